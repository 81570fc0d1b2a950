"""Strings that end a reply: found while it is sampled, so that nothing more is; what came after is cut off."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from tailrace.generation.completions import head, joined
from tailrace.records import Completion, FinishReason, OnChunk

_REPLACEMENT = "\ufffd"
_CHARACTER_BYTES = 4
"""Of a character at most, and so tokens that a part of it can have."""


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
        self._ends = deque([0])
        """Where characters end: no string is before the last one; the first is far enough back to read on from."""

    def __call__(self, chunk: Completion) -> None:
        """Take in a chunk. Raises `StopStringFound` where one of the strings is there."""
        self._chunks.append(chunk)
        self._token_ids += chunk.token_ids.tolist()
        is_there, end = self._find(self._token_ids, self._ends[0])
        if is_there and self._find(self._token_ids)[0]:
            raise StopStringFound
        self._ends.append(end)
        while len(self._ends) > 1 and self._ends[1] <= end - self._window:
            self._ends.popleft()

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
        if not self._find(token_ids)[0]:
            return completion
        ends = range(len(token_ids) + 1)
        most = bisect_left(ends, True, lo=self._ends[-1], key=lambda end: self._find(token_ids[:end])[0])
        _, end = self._find(token_ids[:most])
        self.cut_tokens = len(token_ids) - end
        text = self._decode(token_ids[:end])
        self.found = min((one for one in self._strings if one in text), key=text.index)
        return head(completion, end)

    def before(self, text: str) -> str:
        """The text before the first of the strings."""
        return text[: min((text.index(string) for string in self._strings if string in text), default=len(text))]

    def _find(self, token_ids: Sequence[int], start: int = 0) -> tuple[bool, int]:
        """Whether one of the strings is in the text from `start` on, and up to where: the last whole character's end.

        A part of a character may hide the text before it (byte fallback: a run of bytes is text as a whole, or not at
        all), so that text which ends with one is read without it, too.
        """
        last = len(token_ids)
        for end in range(last, max(start, last - _CHARACTER_BYTES + 1) - 1, -1):
            text = self._decode(token_ids[start:end])
            if any(string in text for string in self._strings):
                return True, end
            if not text.endswith(_REPLACEMENT):
                return False, end
        return False, last


def listener_for(strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> StopStrings | None:
    """Who listens for these; None where there is none."""
    return StopStrings(strings, decode) if strings else None
