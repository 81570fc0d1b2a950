"""What worker processes print, in a file that does not grow without end.

    worker ── pipe ──→ thread ──→ workers.log, and once that is full workers.log.1

A process that wrote the file itself could fill the disk (`while True: print()`) before its call is over.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)

_MAX_BYTES = 10_000_000
_PIECE_BYTES = 1 << 16
_END_S = 1.0
"""How long `close` waits for what is still in the pipes."""


class OutputLog:
    """The file at `path` and the one before it, of up to `max_bytes` each."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._has_failed = False

    @contextmanager
    def writer(self) -> Iterator[int]:
        """A descriptor for a process that is started meanwhile; what it writes is appended until it has ended."""
        ours, its = os.pipe()
        thread = threading.Thread(target=self._copy, args=(ours,), name="output of a rollout worker", daemon=True)
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

    def _copy(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while written := pipe.read(_PIECE_BYTES):
                with self._writing:
                    self._append(written)

    def _append(self, written: bytes) -> None:
        """A disk that takes nothing is told once: the process must not wait for it."""
        try:
            with self._path.open("ab") as file:
                file.write(written)
                is_full = file.tell() >= self._max_bytes
            if is_full:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        except OSError as error:
            if not self._has_failed:
                _log.warning("what rollout workers print is lost: %s cannot be written: %s", self._path, error.strerror)
            self._has_failed = True
