"""One tracker's process, from the run's side: frames go in through a bounded queue, and nothing here is waited for."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from typing import IO

from tailrace.child_processes import describe_exit, kill_group
from tailrace.guards import decoded
from tailrace.reporting.trackers.messages import LATE, Begin, decode_report, frame

_COMMAND = (sys.executable, "-m", "tailrace.reporting.trackers.worker")
_LINE_BYTES = 1 << 16
_GRACE_S = 2.0
"""Longer than the process has by itself: only one that is stopped has to be killed."""
_logger = logging.getLogger(__name__)


class TrackerProcess:
    """Any thread may send. Threads of its own feed the process and hear what failed there."""

    def __init__(self, name: str, begin: Begin, *, queue_records: int) -> None:
        """`name` is for people, and for metrics."""
        self.name = name
        self.dropped = self.failed = 0
        """Records that found the queue full or the process gone; calls that raised in it."""
        self._begin, self._first = begin, frame(begin)
        self._frames: queue.Queue[bytes | None] = queue.Queue(queue_records)
        self._has_warned = self._is_gone = self._is_closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._feeder = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._feeder.start()

    def send(self, data: bytes) -> None:
        """Never waits and never raises; dropped, and counted, where there is no room."""
        if not self._is_gone and not self._is_closing:
            try:
                self._frames.put_nowait(data)
                return
            except queue.Full:
                self._warn("it is slower than this run: records are dropped")
        self.dropped += 1

    def close(self, last: bytes, deadline_s: float) -> None:
        """Send what waits and then `last`, and wait for the process's end until `deadline_s` of the monotonic clock;
        then it is killed. Blocks: call it off the event loop. What did not reach the tracker is counted as dropped."""
        self._is_closing = True
        for data in (last, None):
            with contextlib.suppress(queue.Full):
                self._frames.put(data, timeout=max(0.0, deadline_s - time.monotonic()))
        self._feeder.join(max(0.0, deadline_s - time.monotonic()))
        if self._process is not None:
            self._end(self._process, deadline_s - time.monotonic() + _GRACE_S)
        self.dropped += sum(data not in (None, last) for data in self._rest())

    def _feed(self) -> None:
        try:
            process = self._process = self._started()
        except OSError as error:
            self._is_gone = True
            self._warn(f"its process could not be started: {error.strerror}")
            return
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=self._hear, args=(process.stdout,), name=f"hears {self.name}", daemon=True).start()
        try:
            with process.stdin as pipe:
                pipe.write(self._first)
                pipe.flush()
                while (data := self._frames.get()) is not None:
                    pipe.write(data)
                    pipe.flush()
        except OSError:  # it ended, which `_hear` tells of
            self.dropped += 1
            self._is_gone = True

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._begin.log.parent.mkdir(parents=True, exist_ok=True)
        with self._begin.log.open("ab") as log:
            return subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,  # until its own thread takes that over
                env=environment,
                process_group=0,  # Ctrl-C is the run's; and what the tracker starts ends with it
            )

    def _hear(self, answers: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError), answers:
            while line := answers.readline(_LINE_BYTES):
                self._take(line)
        self._is_gone = True
        if not self._is_closing:
            process = self._process
            status = "" if process is None else f" {describe_exit(process.wait())}"
            self._warn(f"its process ended{status}: nothing more is sent to it")

    def _take(self, line: bytes) -> None:
        report = decoded(decode_report, line)
        if report is None:  # whatever its package wrote there
            return
        self.failed = max(self.failed, report.failed)
        if report.is_over:
            self._warn(f"it could not be started, and nothing is sent to it: {report.why}")
        elif report.failed:
            self._warn(f"a call failed, and more are only counted: {report.why}")

    def _warn(self, why: str) -> None:
        """The first is told; the rest is in its log and in the counts."""
        if not self._has_warned:
            self._has_warned = True
            log = self._begin.log
            _logger.warning("the tracker %s: %s; the run goes on without it (see %s)", self.name, why, log)

    def _end(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        """Wait for its end, or kill it, with what it started."""
        status = LATE
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(max(0.0, timeout_s))
        kill_group(process.pid)
        process.wait()
        if status == LATE:
            self._warn("it had not ended in time (observability.tracker_close_s): what it kept is lost")
        elif status:
            self._warn(f"its process ended {describe_exit(status)}: what it kept is lost")

    def _rest(self) -> list[bytes | None]:
        rest = []
        with contextlib.suppress(queue.Empty):
            while True:
                rest.append(self._frames.get_nowait())
        return rest
