"""One thread that writes, behind a bounded queue: callers never wait for a disk."""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

_OF_SINKS = "records are dropped (counted in sinks/dropped_records)"

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs jobs (each writes one record or one file) in order, in one thread, behind a bounded queue."""

    def __init__(self, *, queue_records: int = 256, when_full: str = _OF_SINKS) -> None:
        """`when_full` is what is dropped where there is no room, and where that is counted: for the log."""
        self.dropped = self.failed = 0
        """Jobs that found the queue full or closed; jobs that raised."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._queue_records, self._when_full = queue_records, when_full
        self._changed = threading.Condition()
        """Guards all but the counts above; told when a job comes or ends, when it is closed and when it is to hurry."""
        self._closed = self._is_busy = False
        self._ended = 0
        self._limit_s = self._until_s = math.inf
        context = contextvars.copy_context()  # so that what it takes is measured
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="observability-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Run `job` in the writer thread. Never waits: False, and counted, without room or once closed."""
        with self._changed:
            if is_taken := not self._closed and len(self._jobs) < self._queue_records:
                self._jobs.append(job)
                self._changed.notify_all()
        if not is_taken:
            self.drop()
        return is_taken

    def drop(self) -> None:
        """Count a record that its sink could not take."""
        self.dropped += 1
        if self.dropped == 1:
            _logger.warning("the disk is slower than this run: %s", self._when_full)

    def hurry(self, limit_s: float) -> None:
        """`close` waits for so long at most; one that waits already, for so long from now on."""
        with self._changed:
            self._limit_s = min(self._limit_s, limit_s)
            if self._closed:
                self._until_s = min(self._until_s, time.monotonic() + limit_s)
                self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Take no more jobs, and finish those that wait for as long as one ends within every `timeout_s`.

        Blocks: call it off the loop. True when all was done; else what was not is counted as dropped.
        """
        with self._changed:
            is_first, self._closed = not self._closed, True
            if is_first:
                self._until_s = time.monotonic() + self._limit_s
            self._changed.notify_all()
            if not is_first or self._finish(timeout_s):
                return not self._is_busy
            lost = self._is_busy + len(self._jobs)
            self._jobs.clear()
            within_s = min(timeout_s, self._limit_s)
        self.dropped += lost
        _logger.warning(
            "the disk has not finished its writes within %.0f s: what waits for it is dropped (%d)", within_s, lost
        )
        return False

    def _finish(self, timeout_s: float) -> bool:
        """Waits; whether all was done in time."""
        seen, since_s = self._ended, time.monotonic()
        while self._is_busy or self._jobs:
            left_s = min(since_s + timeout_s, self._until_s) - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(left_s)
            if self._ended != seen:
                seen, since_s = self._ended, time.monotonic()
        return True

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever a sink raises is counted; the run goes on without it
                self.failed += 1
                if self.failed == 1:
                    _logger.warning("a record could not be written, and the run goes on without it: %s", error)
            del job  # what it holds is not kept until the next one comes
            with self._changed:
                self._is_busy = False
                self._ended += 1
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Waits for a job; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._is_busy = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None
