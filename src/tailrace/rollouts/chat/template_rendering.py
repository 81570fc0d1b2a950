"""Rendering by the model's own chat template, for every model without a hand-written renderer.

Such a template only knows how to render a whole conversation. To append just the new messages, the conversation is
rendered with a sentinel in the place of the last reply, and what follows the sentinel is what the template puts
after a reply: its close, the new messages, the next generation prompt. Only that text is tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

from tailrace.records import Json, Message, ToolCall
from tailrace.rollouts.chat.replies import read_reply
from tailrace.rollouts.chat.tokenizer import ChatTokenizer

_SENTINEL = "\u2042sentinel-reply\u2042"
"""Text that no template changes (no whitespace at its ends, no markup) and conversations hardly hold; checked."""

TOOL: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_CALL: ToolCall = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_USE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [_CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "call_0", "name": "add"},
    {"role": "assistant", "content": "One.", "reasoning_content": "So."},
    {"role": "user", "content": "Sure?"},
]
"""All that a template may show of the use of tools: by it a family, or a dialect of calls, is known."""

_REMEMBERED_TEXTS = 1024
_REMEMBERED_CHARACTERS = 8192
"""Bounds of the encoding cache: some 20 MB at the worst."""


class TemplateRendering:
    """Conversations to tokens by the tokenizer's chat template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._remembered = lru_cache(maxsize=_REMEMBERED_TEXTS)(tokenizer.encode)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token with which the template closes a reply, and the model's own end tokens."""
        close = self._closing_token_id()
        return tuple(dict.fromkeys([*([] if close is None else [close]), *self._tokenizer.end_token_ids]))

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] | None) -> list[int]:
        """The whole conversation, up to where the next reply begins."""
        return self._encode(self._text(messages, tools))

    def bridge(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None,
        *,
        reply_is_closed: bool,
    ) -> list[int] | None:
        """Tokens that follow the reply at the end of `history` (its stop token included if it was sampled).

        None where the template cannot be split there.
        """
        from jinja2 import TemplateError

        around: list[Message] = [*history[:-1], {"role": "assistant", "content": _SENTINEL}, *new_messages]
        try:
            text = self._text(around, tools)
        except TemplateError:
            return None
        if text.count(_SENTINEL) != 1:
            return None
        following = text.partition(_SENTINEL)[2]
        added = self._encode(following)
        visible = (place for place, token in enumerate(added) if self._tokenizer.decode([token]).strip())
        close = next(visible, len(added))
        closes = close < len(added) and added[close] in self.stop_token_ids
        return added[close + 1 :] if reply_is_closed and closes else added

    def reply(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] | None, prompt_ids: list[int]
    ) -> list[int] | None:
        """Tokens of the last message, and of what the template puts after it; None where they do not follow the prompt.

        The prompt's text decides: it is not tokenized together with the reply, as it is not where one is sampled.
        """
        del prompt_ids
        prompt = self._text(messages[:-1], tools)
        whole = self._tokenizer.template.render(messages, tools=tools, add_generation_prompt=False)
        return self._encode(whole[len(prompt) :]) if whole.startswith(prompt) else None

    @cached_property
    def shows_hermes_calls(self) -> bool:
        """Whether a tool call stands in a conversation as `read_reply` reads it."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.template.render(TOOL_USE[1:3], tools=[TOOL])
        except (TemplateError, ValueError, KeyError, TypeError):
            return False
        return any(call["function"] == _CALL["function"] for call in read_reply(text).tool_calls)

    def _encode(self, text: str) -> list[int]:
        """Token ids, cached: the rollouts of a group begin alike and often continue alike."""
        if len(text) > _REMEMBERED_CHARACTERS:
            return self._tokenizer.encode(text)
        return self._remembered(text)

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] | None) -> str:
        return self._tokenizer.template.render(messages, tools=tools, add_generation_prompt=True)

    def _closing_token_id(self) -> int | None:
        """The first token after a reply, where it is a token of its own that text cannot become."""
        from jinja2 import TemplateError

        messages: list[Message] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _SENTINEL},
            {"role": "user", "content": "."},
        ]
        try:
            following = self._text(messages, None).partition(_SENTINEL)[2]
        except TemplateError:
            return None
        added = self._tokenizer.encode(following)
        return added[0] if added and added[0] in self._tokenizer.added_token_ids else None
