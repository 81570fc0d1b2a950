"""What other people's code prints in a process of its own, in a file that does not grow without end.

    worker ── pipe ──→ thread ──→ workers.log, and once that is full workers.log.1

A process that wrote the file itself could fill the disk (`while True: print()`) before its call is over, and would wait
for one that is full.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.tracing.log_files import LogFile

_MAX_BYTES = 10_000_000
_PIECE_BYTES = 1 << 16
_END_S = 1.0
"""How long `close` waits for what is still in the pipes."""


class OutputLog:
    """The file at `path` and the one before it, of up to `max_bytes` each."""

    def __init__(self, path: Path, *, what: str = "what rollout workers print", max_bytes: int = _MAX_BYTES) -> None:
        """`what` is lost where it cannot be written, for people."""
        self._file = LogFile(path, what, max_bytes=max_bytes)
        self._threads: list[threading.Thread] = []

    @contextmanager
    def writer(self) -> Iterator[int]:
        """A descriptor for a process that is started meanwhile; what it writes is appended until it has ended."""
        ours, its = os.pipe()
        thread = threading.Thread(target=self._copy, args=(ours,), name="output", daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        try:
            yield its
        finally:
            os.close(its)

    def close(self) -> None:
        """Wait until what the processes wrote is in the file; they have ended."""
        for thread in self._threads:
            thread.join(_END_S)
        self._file.close()

    def _copy(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while written := pipe.read(_PIECE_BYTES):
                self._file.append(written)
