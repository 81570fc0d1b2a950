"""Answers that are JSON of a schema: `response_format`, `text.format`, `output_config.format`, forced calls.

Rollouts cannot have them: their tokens are trained on under the distribution over the whole vocabulary, and a schema
leaves a part of it at each token, a part that the trainer would have to be told. `tailrace serve` can, where its engine
guides decoding.
"""

from __future__ import annotations

from collections.abc import Collection

from tailrace.gateway.dialects.fields import of_type, require_known, shown
from tailrace.gateway.dialects.protocol import UNSUPPORTED_VALUE, JsonForm, RequestInvalid
from tailrace.gateway.dialects.tool_calls import json_text
from tailrace.records import Json

_READ = ("type", "name", "description", "schema", "strict", "json_schema")
_ANY_OBJECT = '{"type":"object"}'


def read_form(given: Json, parameter: str, *, tools: Collection[object] | None) -> JsonForm | None:
    """What a request says in this field; None for any text. Raises `RequestInvalid`.

    OpenAI's chat completions have the schema inside of another object, and the other dialects beside the type.

    >>> read_form({"type": "json_schema", "schema": {"type": "integer"}}, "text.format", tools=None)
    JsonForm(schema='{"type":"integer"}', parameter='text.format', forces_calls=False)
    """
    form = {} if given is None else of_type(given, dict, parameter)
    require_known(form, read=_READ, neutral={}, within=parameter)
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        message = f"{parameter} = {shown(form)} is not supported: its type may be text, json_object or json_schema"
        raise RequestInvalid(message, parameter=parameter, code=UNSUPPORTED_VALUE)
    if tools:
        message = f"{parameter} with tools is not supported: an answer of a schema calls none; leave one of them out"
        raise RequestInvalid(message, parameter=parameter, code=UNSUPPORTED_VALUE)
    if kind == "json_object":
        return JsonForm(_ANY_OBJECT, parameter)
    named = form.get("json_schema")
    if named is not None:
        form = of_type(named, dict, parameter)
        require_known(form, read=_READ, neutral={}, within=parameter)
    return JsonForm(json_text(of_type(form.get("schema"), dict, parameter)), parameter)


def require_no_form(form: JsonForm | None) -> None:
    """Raise `RequestInvalid` for one that is asked of a rollout."""
    if form is not None and form.forces_calls:
        raise RequestInvalid(
            f"{form.parameter} that forces a call is not supported in a rollout: its tokens are trained on under the "
            "distribution over the whole vocabulary, so calls are not guided; it may be auto or none",
            parameter=form.parameter,
            code=UNSUPPORTED_VALUE,
        )
    if form is not None:
        raise RequestInvalid(
            f"{form.parameter} of JSON is not supported in a rollout: its tokens are trained on under the distribution "
            "over the whole vocabulary, of which a schema leaves a part; ask for the form in the prompt, and reward it",
            parameter=form.parameter,
            code=UNSUPPORTED_VALUE,
        )
