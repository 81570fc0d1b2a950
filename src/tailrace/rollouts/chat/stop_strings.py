"""Strings that end a reply: found while it is sampled, so that nothing more is; what came after is cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.generation.completions import head, joined
from tailrace.records import Completion, FinishReason, OnChunk


class StopStringFound(Exception):
    """Raised out of `generate` by its listener: the request is aborted, and its tokens are in the listener."""


class StopStrings:
    """Listens to the chunks of one request."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings, self._decode = strings, decode
        self._window = max(len(string.encode()) for string in strings)
        """Tokens that the longest of them can have at most."""
        self.cut_tokens = 0
        """Tokens that were sampled after one of them."""
        self.found: str | None = None
        """The one that ended the reply: the first in its text."""
        self._chunks: list[Completion] = []
        self._token_ids: list[int] = []

    def __call__(self, chunk: Completion) -> None:
        """Take in a chunk. Raises `StopStringFound` where one of the strings is there."""
        start = len(self._token_ids)
        self._chunks.append(chunk)
        self._token_ids += chunk.token_ids.tolist()
        if self._holds(self._token_ids[max(0, start - self._window) :]):
            raise StopStringFound

    def after(self, other: OnChunk) -> OnChunk:
        """Both listen, the other one first, since this one may have heard enough."""

        def hear(chunk: Completion) -> None:
            other(chunk)
            self(chunk)

        return hear

    @property
    def completion(self) -> Completion:
        """What was sampled until one was found, without what came after it."""
        return self.cut(joined(None, self._chunks, FinishReason.STOP))

    def cut(self, completion: Completion) -> Completion:
        """The completion up to and with the token that completes one of the strings; all of it where none is there."""
        token_ids: list[int] = completion.token_ids.tolist()
        if not self._holds(token_ids):
            return completion
        ends = range(1, len(token_ids) + 1)
        end = next(end for end in ends if self._holds(token_ids[max(0, end - self._window) : end]))
        self.cut_tokens = len(token_ids) - end
        text = self._decode(token_ids[:end])
        self.found = min((one for one in self._strings if one in text), key=text.index)
        return head(completion, end)

    def before(self, text: str) -> str:
        """The text before the first of the strings."""
        return text[: min((text.index(string) for string in self._strings if string in text), default=len(text))]

    def _holds(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(string in text for string in self._strings)


def listener_for(strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> StopStrings | None:
    """Who listens for these; None where there is none."""
    return StopStrings(strings, decode) if strings else None
