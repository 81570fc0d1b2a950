"""The model that a judge calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.records import Message


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The next message of a conversation, and what it took."""

    content: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chat(Protocol):
    """A model that answers conversations."""

    async def __call__(self, messages: Sequence[Message], *, max_tokens: int, temperature: float) -> ChatAnswer:
        """The next message. Raises `ChatFailed`; has no time limit of its own."""

    async def close(self) -> None:
        """Close connections, where it has any."""
