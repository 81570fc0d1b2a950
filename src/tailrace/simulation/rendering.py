"""Chat rendering without a tokenizer: every message is so many tokens, and every reply says nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.records import Completion, Int32Array, Message, ToolSpec
from tailrace.rollouts import ParsedReply

_SILENCE = ParsedReply(content="")


class ModelledRenderer:
    """Implements `rollouts.Renderer`."""

    stop_token_ids = (1,)

    def __init__(self, tokens_per_message: int) -> None:
        self._message = np.zeros(tokens_per_message, np.int32)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Int32Array:
        """[len(messages) * tokens_per_message]."""
        return np.tile(self._message, len(messages))

    def bridge(
        self,
        token_ids: Int32Array,
        reply_start: int,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
    ) -> Int32Array:
        """What the new messages add."""
        return self.render(new_messages)

    def parse(
        self, completion: Completion, *, prompt_token_ids: Int32Array, tools: Sequence[ToolSpec] | None = None
    ) -> ParsedReply:
        """Nothing."""
        return _SILENCE

    def drifts(self, completion: Completion) -> bool:
        """There is no text that could be tokenized otherwise."""
        return False
