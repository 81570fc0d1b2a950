"""A reply's text while it is sampled, for whoever reads along.

    chunks ─► tokens without the one that ends it ─► complete characters ─► what no marker or stop string can take back

What is handed on is always the beginning of what the reply will say. Where that cannot be known yet, or never (a tool
call, reasoning, bytes that are no text), the rest stays with the reply. So does white space until something follows it:
where that is a marker, the reply may not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tailrace.records import Completion
from tailrace.rollouts.chat.replies import MARKERS

_REPLACEMENT = "\ufffd"


class TextDeltas:
    """Listens to the chunks of one request, and calls `on_text` with more of its text."""

    def __init__(
        self,
        on_text: Callable[[str], None],
        *,
        decode: Callable[[Sequence[int]], str],
        stop_token_ids: Collection[int],
        stop: Sequence[str] = (),
    ) -> None:
        self._on_text, self._decode, self._stop_token_ids = on_text, decode, stop_token_ids
        self._ends = (*MARKERS, *stop, _REPLACEMENT)
        self._beginnings = {end[:length] for end in self._ends for length in range(1, len(end))}
        self._longest = max(len(end) for end in self._ends)
        self._token_ids: list[int] = []
        self._context_start = self._read = 0
        """Tokens before `_read` are text already; those from `_context_start` on are decoded again with the next ones,
        since what a token says may depend on the one before it."""
        self._held = ""
        """White space, and text that may turn out to be the beginning of a marker or of a stop string."""
        self._is_over = False

    def __call__(self, chunk: Completion) -> None:
        """Take in a chunk."""
        if self._is_over:
            return
        self._token_ids += chunk.token_ids.tolist()
        if self._token_ids and self._token_ids[-1] in self._stop_token_ids:
            self._token_ids.pop()
        if text := self._new_text():
            self._hand_on(self._held + text)

    def _new_text(self) -> str:
        """Complete characters of the tokens that are no text yet."""
        known = self._decode(self._token_ids[self._context_start : self._read])
        text = self._decode(self._token_ids[self._context_start :])
        if len(text) <= len(known) or text.endswith(_REPLACEMENT):
            return ""
        self._context_start, self._read = self._read, len(self._token_ids)
        return text[len(known) :]

    def _hand_on(self, text: str) -> None:
        ends = [place for end in self._ends if (place := text.find(end)) >= 0]
        self._is_over = bool(ends)
        end = min(ends) if ends else len(text) - self._beginning_of_an_end(text)
        known = text[:end].rstrip()
        self._held = text[len(known) :]
        if known:
            self._on_text(known)

    def _beginning_of_an_end(self, text: str) -> int:
        """How many of its last characters may be the first ones of a marker or of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
