"""Chat rendering without a tokenizer: every message has the same number of tokens, and every reply is empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from tailrace.records import Completion, Int32Array, Message, ToolSpec
from tailrace.rollouts.chat import ParsedReply, Renderer

_EMPTY = ParsedReply(content="")


class ModelledRenderer(Renderer):
    """Messages of `tokens_per_message` tokens each."""

    stop_token_ids = (1,)

    def __init__(self, tokens_per_message: int) -> None:
        self._message = np.zeros(tokens_per_message, np.int32)

    @override
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Int32Array:
        return np.tile(self._message, len(messages))

    @override
    def bridge(
        self,
        token_ids: Int32Array,
        reply_start: int,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
    ) -> Int32Array:
        return self.render(new_messages)

    @override
    def demonstrate(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None
    ) -> tuple[Int32Array, Int32Array]:
        return self.render(messages[:-1]), self._message

    @override
    def parse(self, completion: Completion, **_: Any) -> ParsedReply:
        return _EMPTY

    @override
    def text(self, token_ids: Sequence[int]) -> str:
        return ""

    @override
    def reply_text(self, completion: Completion) -> str:
        return ""

    @override
    def replies_in_plain_text(self, prompt_token_ids: Int32Array) -> bool:
        return False

    @override
    def drifts(self, completion: Completion) -> bool:
        return False
