"""The process of one tracker: takes messages from its standard input until it is closed, and ends by a deadline.

    stdin ─► frames ─► tracker            stdout ─► what failed
    what the tracker prints ─► its log, of bounded size

It ends by itself where the run is gone.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

import msgspec

from tailrace.errors import DataError
from tailrace.reporting.rollout_records import RolloutRecord, decode_line
from tailrace.reporting.trackers.messages import (
    LATE,
    Begin,
    Checkpoint,
    End,
    Histograms,
    Message,
    Metrics,
    Rollouts,
    TrackerReport,
    decode_begin,
    decode_message,
    read_frame,
)
from tailrace.reporting.trackers.protocol import Tracker
from tailrace.reporting.trackers.registry import load
from tailrace.tracing.output_log import OutputLog

_NICENESS = 5


def main() -> None:
    """Serve one tracker."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    begin = decode_begin(read_frame(requests))
    os.nice(_NICENESS)
    threading.Thread(target=_end_late, args=(requests.fileno(), begin.close_s), daemon=True).start()
    output = OutputLog(begin.log, what=f"what the tracker {begin.tracker} prints")
    with output.writer() as descriptor:
        _take_descriptors(descriptor)
    sys.path[:] = begin.module_path
    _Server(begin, answers).serve(requests)
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)  # ends what the log's thread copies, as far as the tracker left no process behind
    output.close()
    os._exit(0)  # threads and exit handlers of the tracker's package have had their time


def _take_descriptors(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)


def _end_late(requests: int, close_s: float) -> None:
    """End the process, whatever it does, so long after the run closed the pipe or vanished."""
    hung_up = select.poll()
    hung_up.register(requests, 0)  # nothing but POLLHUP
    hung_up.poll()
    time.sleep(close_s)
    os._exit(LATE)


class _Server:
    def __init__(self, begin: Begin, answers: BinaryIO) -> None:
        self._begin, self._answers = begin, answers
        self._failed = 0
        self._has_ended = False

    def serve(self, requests: BinaryIO) -> None:
        """Until the pipe is closed."""
        try:
            tracker = load(self._begin.tracker)(self._begin.run)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises costs the tracker, and is told
            traceback.print_exc()
            self._report(TrackerReport(why=_one_line(error), is_over=True))
            return
        self._report(TrackerReport())
        while body := read_frame(requests):
            message = decode_message(body)
            self._call(partial(self._handle, tracker, message))
        if not self._has_ended:
            self._call(partial(tracker.end, None))

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises costs the tracker, and is told
            traceback.print_exc()
            self._failed += 1
            self._report(TrackerReport(self._failed, _one_line(error)))

    def _handle(self, tracker: Tracker, message: Message) -> None:
        match message:
            case Metrics(step, wall_s, metrics):
                tracker.log(step, wall_s, metrics)
            case Histograms(step, histograms):
                tracker.log_histograms(step, histograms)
            case Rollouts(step, lines):
                tracker.log_rollouts(step, _records(lines))
            case Checkpoint(step, path):
                tracker.log_checkpoint(step, path)
            case End(summary):
                self._has_ended = True
                tracker.end(msgspec.json.decode(summary) if summary else None)

    def _report(self, report: TrackerReport) -> None:
        try:
            self._answers.write(msgspec.json.encode(report) + b"\n")
            self._answers.flush()
        except OSError:  # nobody listens any more
            pass


def _records(lines: list[bytes]) -> list[RolloutRecord]:
    found = []
    for line in lines:
        try:
            found.append(decode_line(line))
        except DataError:
            traceback.print_exc()
    return found


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
    return " ".join(text.split())[:500]


if __name__ == "__main__":
    main()
