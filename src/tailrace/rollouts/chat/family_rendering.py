"""Rendering by the hand-written renderer of a model family (package `renderers`), chosen by the model's public name,
or else by its template.

The package takes 0.7 s to import, so it is imported only for a model with such a name, or a template that shows tools.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import takewhile
from typing import Any, Literal

from tailrace.errors import ModelError
from tailrace.models.files import is_public
from tailrace.records import Json, Message, ToolCall
from tailrace.rollouts.chat.replies import ParsedReply, as_tool_call
from tailrace.rollouts.chat.template import TODAY
from tailrace.rollouts.chat.template_rendering import TOOL, TOOL_USE, TemplateRendering
from tailrace.rollouts.chat.tokenizer import ChatTokenizer

_log = logging.getLogger(__name__)

_HARMONY = "gpt-oss"
"""Its renderer loads a vocabulary of its own, and its prompt goes on to where a reply reasons first."""
_HARMONY_MODEL = "openai/gpt-oss-20b"
_HARMONY_TOKEN = "<|constrain|>"
_NAME_RESULTS = {_HARMONY, "gemma4", "inkling"}
"""Families that show of which function a result is; others would show the name in place of the role."""
_PROBE: list[Message] = [{"role": "user", "content": "Hello?"}]
"""A fine-tune often keeps its base model's name and not its template: they must agree on this much."""


class FamilyRendering:
    """Conversations to tokens by a renderer that mirrors one family's template and knows its tool-call format."""

    def __init__(self, renderer: Any, family: str, tokenizer: ChatTokenizer) -> None:
        self._renderer, self.family, self._tokenizer = renderer, family, tokenizer
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] | None) -> list[int]:
        """The whole conversation, up to where the next reply begins."""
        return list(self._renderer.render_ids(self._named(messages), tools=tools, add_generation_prompt=True))

    def bridge(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None,
    ) -> list[int] | None:
        """Tokens that follow `prompt_ids + completion_ids`, which are those of `history`.

        None where the renderer cannot prove the extension.
        """
        added = self._named([*history, *new_messages])[len(history) :]
        rendered = self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, added, tools=tools)
        if rendered is None:
            return None
        before = len(prompt_ids) + len(completion_ids)
        token_ids: list[int] = rendered.token_ids
        if token_ids[len(prompt_ids) : before] != completion_ids or token_ids[: len(prompt_ids)] != prompt_ids:
            return None
        return token_ids[before:]

    def reply(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] | None, prompt_ids: list[int]
    ) -> list[int] | None:
        """Tokens of the last message, and of what follows it; None where they do not follow the prompt's."""
        whole = list(self._renderer.render_ids(self._named(messages), tools=tools, add_generation_prompt=False))
        return whole[len(prompt_ids) :] if whole[: len(prompt_ids)] == prompt_ids else None

    def parse(
        self,
        token_ids: list[int],
        *,
        prompt_ids: list[int],
        tools: Sequence[Mapping[str, Json]] | None,
        reads_calls: bool,
    ) -> ParsedReply:
        """What a completion says. Raises `ValueError` and `RecursionError` for calls of a size that nobody reads."""
        parsed = self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        if not reads_calls and parsed.tool_calls:
            text = self._text_from_calls(token_ids, parsed.tool_calls)
            return ParsedReply(parsed.content + text, parsed.reasoning_content)
        content, malformed = parsed.content, 0
        calls: list[ToolCall] = []
        for attempt in parsed.tool_calls:
            call = None
            if attempt.status == "ok":
                call = as_tool_call(attempt.name, attempt.arguments, number=len(calls), call_id=attempt.id)
            if call is None:
                malformed += 1
                content += attempt.raw
            else:
                calls.append(call)
        return ParsedReply(content, parsed.reasoning_content, calls, malformed)

    def _text_from_calls(self, token_ids: list[int], attempts: Sequence[Any]) -> str:
        """The rest of a completion from the first of its calls on, and the white space before that."""
        span = attempts[0].token_span
        if span is None:  # its family's parser reads text
            return "".join(attempt.raw for attempt in attempts)
        token_ids = list(takewhile(lambda token_id: token_id not in self.stop_token_ids, token_ids))
        before = self._tokenizer.decode(token_ids[: span[0]])
        return before[len(before.rstrip()) :] + self._tokenizer.decode(token_ids[span[0] :])

    def _named(self, messages: Sequence[Message]) -> list[Message]:
        """The messages; tools' results with the name of the function that was called, where the family writes it."""
        if self.family not in _NAME_RESULTS:
            return list(messages)
        named: list[Message] = []
        names: dict[str | None, str] = {}  # ids come again in every reply
        for message in messages:
            names.update({call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or []})
            name = message.get("name") or names.get(message.get("tool_call_id"))
            named.append({**message, "name": name} if message["role"] == "tool" and name else message)
        return named


def family_rendering(
    tokenizer: ChatTokenizer, thinking_retention: Literal["all", "template"]
) -> FamilyRendering | None:
    """The hand-written renderer for the model that `tokenizer` belongs to; None where there is none."""
    name = tokenizer.name_or_path
    if not is_public(name) and not tokenizer.template.knows_tools:
        return None
    from renderers.base import MODEL_RENDERER_MAP

    if name not in MODEL_RENDERER_MAP:
        known = _known_by_template(tokenizer)
        return None if known is None else _made(tokenizer, known, thinking_retention)
    try:
        rendering = _made(tokenizer, name, thinking_retention)
    except (AssertionError, ValueError) as error:  # a token that the family has and this tokenizer lacks
        _log.warning("%s: its family's renderer cannot be used (%s); using the chat template", name, error)
        return None
    if not _agrees_with_template(rendering, tokenizer):
        _log.warning("%s: its chat template is not its family's (a fine-tune?); using the chat template", name)
        return None
    return rendering


def _made(tokenizer: ChatTokenizer, name: str, thinking_retention: Literal["all", "template"]) -> FamilyRendering:
    """The renderer of the public model called `name`, for its or another's tokenizer.

    Raises `AssertionError` and `ValueError` where that lacks a token, `ModelError` for a vocabulary that is not there.
    """
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import AutoRendererConfig

    family = MODEL_RENDERER_MAP[name]
    named = copy(tokenizer)
    named.name_or_path = name
    config = AutoRendererConfig(thinking_retention="all" if thinking_retention == "all" else None)
    options = {"conversation_start_date": TODAY.strftime("%Y-%m-%d")} if family == _HARMONY else None
    try:
        return FamilyRendering(create_renderer(named, config, chat_template_kwargs=options), family, tokenizer)
    except RuntimeError as error:
        raise ModelError(
            f"{tokenizer.name_or_path}: the vocabulary of its renderer cannot be fetched ({error}); without a network, "
            "put o200k_base.tiktoken into a folder and name that in TIKTOKEN_ENCODINGS_BASE"
        ) from error


def _known_by_template(tokenizer: ChatTokenizer) -> str | None:
    """A public model whose renderer makes the same tokens as the tokenizer's template, where a tool is used too."""
    from jinja2 import TemplateError
    from renderers.base import MODEL_RENDERER_MAP

    if tokenizer.convert_tokens_to_ids(_HARMONY_TOKEN) in tokenizer.added_token_ids:
        harmony = _made(tokenizer, _HARMONY_MODEL, "template")
        return _HARMONY_MODEL if _agrees_with_template(harmony, tokenizer) else None
    try:
        tool_use = TemplateRendering(tokenizer).render(TOOL_USE, [TOOL])
    except (TemplateError, ValueError, KeyError, TypeError):
        return None
    for name, family in MODEL_RENDERER_MAP.items():
        if family == _HARMONY:
            continue
        try:
            rendering = _made(tokenizer, name, "template")
            if rendering.render(TOOL_USE, [TOOL]) == tool_use and _agrees_with_template(rendering, tokenizer):
                return str(name)
        except Exception:  # noqa: BLE001 - of any kind, where a renderer meets another family's tokens
            continue
    return None


def _agrees_with_template(rendering: FamilyRendering, tokenizer: ChatTokenizer) -> bool:
    from jinja2 import TemplateError

    prompt = rendering.render(_PROBE, None)
    try:
        expected = TemplateRendering(tokenizer).render(_PROBE, None)
    except TemplateError:
        return False
    return prompt == expected or (rendering.family == _HARMONY and prompt[: len(expected)] == expected)
