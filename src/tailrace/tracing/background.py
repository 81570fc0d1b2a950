"""One thread that writes, behind a bounded queue: callers never wait for a disk."""

from __future__ import annotations

import contextvars
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs jobs (each writes one record or one file) in order, in one thread, behind a bounded queue."""

    def __init__(self, *, queue_records: int = 256) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(queue_records)
        self.dropped = self.failed = 0
        """Jobs that found the queue full or closed; jobs that raised."""
        self._closed = False
        self._ended = 0
        context = contextvars.copy_context()  # so that what it takes is measured
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="observability-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Run `job` in the writer thread. Never waits: False, and counted, without room or once closed."""
        if not self._closed:
            try:
                self._jobs.put_nowait(job)
                return True
            except queue.Full:
                pass
        self.drop()
        return False

    def drop(self) -> None:
        """Count a record that its sink could not take."""
        self.dropped += 1
        if self.dropped == 1:
            _logger.warning("the disk is slower than this run: records are dropped (counted in sinks/dropped_records)")

    def close(self, timeout_s: float = 10.0, *, limit_s: float = math.inf) -> bool:
        """Take no more jobs, and finish those that wait for as long as one ends within every `timeout_s`, and `limit_s`
        at most.

        Blocks: call it off the loop. True when all was done; else what was not is counted as dropped.
        """
        if not self._closed:
            self._closed = True
            if not self._finish(min(timeout_s, limit_s), time.monotonic() + limit_s):
                self._give_up(min(timeout_s, limit_s))
        return not self._thread.is_alive()

    def _finish(self, timeout_s: float, until_s: float) -> bool:
        try:
            self._jobs.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        seen = -1
        while self._thread.is_alive() and seen != self._ended and (left_s := until_s - time.monotonic()) > 0:
            seen = self._ended
            self._thread.join(min(timeout_s, left_s))
        return not self._thread.is_alive()

    def _give_up(self, timeout_s: float) -> None:
        lost = 1  # the one that hangs
        with suppress(queue.Empty):
            while True:
                lost += self._jobs.get_nowait() is not None
        self._jobs.put_nowait(None)  # should that one end after all
        self.dropped += lost
        _logger.warning(
            "the disk has not finished its writes within %.0f s: what waits for it is dropped (%d)", timeout_s, lost
        )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever a sink raises is counted; the run goes on without it
                self.failed += 1
                if self.failed == 1:
                    _logger.warning("a record could not be written, and the run goes on without it: %s", error)
            self._ended += 1
            del job  # what it holds is not kept until the next one comes
