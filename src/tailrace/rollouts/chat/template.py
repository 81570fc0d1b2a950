"""A model's own chat template, compiled once: the Jinja dialect that Hugging Face chat templates are written in.

Same environment as transformers' `apply_chat_template` (sandboxed, `trim_blocks`, `lstrip_blocks`, loop controls,
`{% generation %}`, `raise_exception`, a `tojson` that does not escape HTML), without transformers; but it is always the
same day (`strftime_now`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from tailrace.errors import ModelError
from tailrace.records import Json

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TOOL_USE = "tool_use"
"""Name of the template that models with several use when tools are given."""
DEFAULT = "default"
TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""The day that templates which name one are told. Always the same one, or a run that goes on tomorrow would train on
other prompts; Llama's own template and renderer fall back to this one."""


class ChatTemplate:
    """Conversations to text, as the model's authors wrote it.

    >>> template = ChatTemplate({"default": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}"}, {})
    >>> template.render([{"role": "user", "content": "hi"}])
    '[user] hi\\n'
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        if DEFAULT not in sources:
            raise ModelError(f"the model's chat templates ({', '.join(sources) or 'none'}) include no {DEFAULT!r} one")
        self._templates = {name: _compile(source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)
        self.knows_tools = any("tool" in source for source in sources.values())
        """Whether it may show tools, or calls of them."""

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text. Raises `jinja2.TemplateError` where the template refuses it."""
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        return self._templates[name].render(
            messages=[_for_template(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )


def _for_template(message: Mapping[str, Json]) -> Mapping[str, Json]:
    """Arguments of tool calls as objects (many templates iterate them), reasoning under both names in use."""
    if "tool_calls" not in message and "reasoning_content" not in message:
        return message
    changed = dict(message)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [_with_parsed_arguments(call) for call in changed["tool_calls"]]
    if changed.get("reasoning_content") is not None:
        changed.setdefault("thinking", changed["reasoning_content"])
    return changed


def _with_parsed_arguments(call: Mapping[str, Json]) -> Mapping[str, Json]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}}


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError

    try:
        template = _environment().from_string(source)
        template.globals = dict(template.globals)  # a chain of mappings is copied a hundred times slower, every time
        return template
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the model's chat template does not compile (line {error.lineno}): {error.message}"
        ) from error


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _generation_tag() -> type:
    """The `{% generation %}` tag marks what a model writes; here it renders its body and nothing more."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  as Jinja types it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    return GenerationTag


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    from jinja2 import TemplateError

    raise TemplateError(message)
