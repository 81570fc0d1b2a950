"""Published weights, lent to be sent to generators that do not see their folder: whole, or what changed.

    lend(ref, held) ──► the file, whole                   `held` is "", or no file that was lent of late
                    ──► what changed since file `held`    where that is much shorter (`MAX_SHARE`)

What a generator holds it names by the file's digest, and what it makes of a delta is compared with the new file's: a
wrong base is found, and is answered by the whole file. There are no chains: a delta leads from whatever a generator
holds to the newest weights. For that the newest two files that were lent stay open, so that the trainer's store has one
file more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

from tailrace.records import ModelStateDictRef
from tailrace.transport.weights.deltas import Delta, digest_of, encode_delta
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore

MAX_SHARE: Final = 0.4
"""Of the whole file's bytes, that a delta may have. What is saved has to be worth coding and applying it, which takes
about as long as a connection of 2 Gbit/s takes for the rest: float32, of which half would be sent, is sent whole."""
_KEPT_FILES = 2


@dataclass(frozen=True, slots=True)
class LentWeights:
    """What to send."""

    version: int
    content: memoryview
    digest: str
    """Of the whole file of this version."""
    base: str = ""
    """Digest of the file that `content` is a delta of; none where it is the whole file."""


@dataclass(frozen=True, slots=True)
class LendingFigures:
    """Of everything that was lent since the run began."""

    sends: int = 0
    whole_sends: int = 0
    sent_bytes: int = 0
    whole_bytes: int = 0
    """That would have been sent without deltas."""
    compared_bytes: int = 0
    """Of files of which it is known how much changed."""
    changed_bytes: int = 0

    def since(self, earlier: LendingFigures) -> LendingFigures:
        """What came on top."""
        return LendingFigures(*(own - before for own, before in zip(astuple(self), astuple(earlier), strict=True)))

    def plus(self, others: LendingFigures) -> LendingFigures:
        """Of both."""
        return LendingFigures(*(own + other for own, other in zip(astuple(self), astuple(others), strict=True)))


@dataclass(slots=True)
class _KeptFile:
    digest: str
    content: memoryview
    opened: ExitStack
    """Closing it lets the store write to the file again."""


class ModelStateDictLender:
    """The lender of a run, to all of its generators; safe across threads. Its calls block: not for an event loop."""

    def __init__(self, folder: Path, *, deltas: bool = True) -> None:
        """`folder` is a `SharedMemoryModelStateDictStore`'s."""
        self.figures = LendingFigures()
        self._store, self._deltas = SharedMemoryModelStateDictStore(folder), deltas
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], _KeptFile] = {}  # by place and version
        self._newest_delta: tuple[str, str, Delta | None] = ("", "", None)

    @contextmanager
    def lend(self, ref: ModelStateDictRef, held: str = "") -> Iterator[LentWeights]:
        """To a receiver that holds the file of digest `held`, for the length of a `with` block, in which all is sent.

        Versions may be newer than the reference's. Raises as `SharedMemoryModelStateDictStore.open` does.
        """
        with self._store.lend_file(ref) as (found, content):
            with self._lock:
                digest, delta = self._look_up(found, content, held)
                self._count(len(content), delta)
            if delta is None:
                yield LentWeights(found.version, content, digest)
            else:
                yield LentWeights(found.version, memoryview(delta.content), digest, base=held)

    def close(self) -> None:
        """Let go of all files. Closing twice does nothing."""
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].opened.close()

    def _look_up(self, found: ModelStateDictRef, content: memoryview, held: str) -> tuple[str, Delta | None]:
        """The digest of a file, and what changed from the one that is held, where that is known and short."""
        if not self._deltas or self._is_late(found):
            return digest_of(content), None
        wanted = self._keep(found)
        base = next((kept for kept in self._kept.values() if kept.digest == held), None)
        if base is None:
            return wanted.digest, None
        if self._newest_delta[:2] != (held, wanted.digest):
            delta = encode_delta(base.content, wanted.content, max_share=MAX_SHARE)
            self._newest_delta = held, wanted.digest, delta
        return wanted.digest, self._newest_delta[2]

    def _is_late(self, found: ModelStateDictRef) -> bool:
        """Whether a file is looked up after all that are kept were, though it is older: it was opened before them."""
        full = len(self._kept) == _KEPT_FILES
        return full and all(found.version < version for _, version in self._kept)

    def _keep(self, found: ModelStateDictRef) -> _KeptFile:
        """The file, kept open, with its digest, which is computed once."""
        key = found.uri, found.version
        if key not in self._kept:
            with ExitStack() as opened:
                _, content = opened.enter_context(self._store.lend_file(found))
                self._kept[key] = _KeptFile(digest_of(content), content, opened.pop_all())
            if len(self._kept) > _KEPT_FILES:
                self._kept.pop(min(self._kept, key=lambda kept: kept[1])).opened.close()
        return self._kept[key]

    def _count(self, whole_bytes: int, delta: Delta | None) -> None:
        before = self.figures
        self.figures = replace(
            before,
            sends=before.sends + 1,
            whole_sends=before.whole_sends + (delta is None),
            sent_bytes=before.sent_bytes + (whole_bytes if delta is None else len(delta.content)),
            whole_bytes=before.whole_bytes + whole_bytes,
            compared_bytes=before.compared_bytes + (0 if delta is None else whole_bytes),
            changed_bytes=before.changed_bytes + (0 if delta is None else delta.changed_bytes),
        )
