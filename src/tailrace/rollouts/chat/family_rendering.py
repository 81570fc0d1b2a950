"""Rendering by the hand-written renderer of a model family (package `renderers`), chosen by the model's name.

The package takes 0.7 s to import, so it is imported only for a model whose name could be one it knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tailrace.records import Json, Message, ToolCall
from tailrace.rollouts.chat.replies import ParsedReply, as_tool_call
from tailrace.rollouts.chat.template_rendering import TemplateRendering
from tailrace.rollouts.chat.tokenizer import ChatTokenizer

_log = logging.getLogger(__name__)

_PROBE: list[Message] = [{"role": "user", "content": "Hello?"}]
"""A fine-tune often keeps its base model's name and not its template: they must agree on this much."""


class FamilyRendering:
    """Conversations to tokens by a renderer that mirrors one family's template and knows its tool-call format."""

    def __init__(self, renderer: Any, family: str) -> None:
        self._renderer, self.family = renderer, family
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] | None) -> list[int]:
        """The whole conversation, up to where the next reply begins."""
        return list(self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True))

    def bridge(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None,
    ) -> list[int] | None:
        """Tokens that follow `prompt_ids + completion_ids`; None where the renderer cannot prove the extension."""
        rendered = self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, list(new_messages), tools=tools)
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
        whole = list(self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=False))
        return whole[len(prompt_ids) :] if whole[: len(prompt_ids)] == prompt_ids else None

    def parse(
        self, token_ids: list[int], *, prompt_ids: list[int], tools: Sequence[Mapping[str, Json]] | None
    ) -> ParsedReply:
        """What a completion says."""
        parsed = self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
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


def family_rendering(
    tokenizer: ChatTokenizer, thinking_retention: Literal["all", "template"]
) -> FamilyRendering | None:
    """The hand-written renderer for the model that `tokenizer` belongs to; None where there is none."""
    name = tokenizer.name_or_path
    if name.count("/") != 1 or Path(name).is_absolute() or Path(name).exists():
        return None  # a folder is no public name: its own template is right
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import AutoRendererConfig

    if name not in MODEL_RENDERER_MAP:
        return None
    config = AutoRendererConfig(thinking_retention="all" if thinking_retention == "all" else None)
    try:
        rendering = FamilyRendering(create_renderer(tokenizer, config), MODEL_RENDERER_MAP[name])
    except (AssertionError, ValueError) as error:  # a token that the family has and this tokenizer lacks
        _log.warning("%s: its family's renderer cannot be used (%s); using the chat template", name, error)
        return None
    if not _agrees_with_template(rendering, tokenizer):
        _log.warning("%s: its chat template is not its family's (a fine-tune?); using the chat template", name)
        return None
    return rendering


def _agrees_with_template(rendering: FamilyRendering, tokenizer: ChatTokenizer) -> bool:
    from jinja2 import TemplateError

    try:
        return rendering.render(_PROBE, None) == TemplateRendering(tokenizer).render(_PROBE, None)
    except TemplateError:
        return False
