"""`trace.json`: a Chrome trace of the whole pipeline, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

    each process ── spans ──▶ its own part (one JSON event a line, written by a thread) ──┐
    the run, at its end ── join_trace ──▶ trace.json ◀────────────────────────────────────┘

Times are Unix time in whole microseconds, so that parts of several hosts lie beside each other as well as their clocks
agree. What overlaps lies in lanes: `rollouts 0`, `rollouts 1`, ... are one track each, and in one lane spans nest. The
bytes of a process are bounded; what comes after is counted, and so is what its disk is too slow for, or does not take.
Format: "Trace Event Format", Chromium project (complete, counter and metadata events).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import socket
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.records import Json
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.wall_clock import monotonic_to_unix_ns

TRACE_FILE = "trace.json"
_PART_SUFFIX = ".events"
_EVENTS_AT_ONCE = 256
_HELD_NS = 1_000_000_000
"""A reader sees what happened that long ago, if something has happened since."""
_QUEUED_WRITES = 64
_WHEN_FULL = "spans are left out of the trace, which counts them at its end"
_AFTER_CUT_LINE = b" \n"
"""Ends a line that an earlier life's end, or a full disk, cut short, so that no event ends it: it is left out when
parts are joined."""

_logger = logging.getLogger(__name__)

_Span: TypeAlias = tuple[str, str, int, int, int, Mapping[str, Json] | None]
"""Name, track, lane, began_ns, duration_ns, about."""


class TraceWriter:
    """One process's part of the trace. Any thread may add to it; a thread of its own writes."""

    def __init__(self, folder: Path, process: str, *, max_bytes: int) -> None:
        """Write `folder/<process>.events`, at most `max_bytes` of it, after what an earlier life of the process did."""
        self._path = folder / (process + _PART_SUFFIX)
        self._writer = BackgroundWriter(queue_records=_QUEUED_WRITES, when_full=_WHEN_FULL)
        self._spans: list[_Span] = []
        self._lanes: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._free_lanes: defaultdict[str, list[int]] = defaultdict(list)
        self._to_unix_ns = monotonic_to_unix_ns()
        self._tids: dict[tuple[str, int], int] = {}
        self._named: set[int] = set()
        """Lanes whose names are written."""
        self._dropped = self._flushed_ns = 0
        self._is_full = self._is_closed = False
        self._before_next = b""
        """Goes before what is appended next."""
        folder.mkdir(parents=True, exist_ok=True)
        self._append(_AFTER_CUT_LINE)
        part_bytes = self._path.stat().st_size
        self._left_bytes = max_bytes - part_bytes
        self._pid = _process_number(process, part_bytes)
        label = f"pid {os.getpid()} on {socket.gethostname()}"
        for name, told in (("process_name", {"name": process}), ("process_labels", {"labels": label})):
            self._append(_line({"ph": "M", "name": name, "pid": self._pid, "args": told}))

    def take_lane(self, track: str) -> int:
        """The lowest lane of a track that is free."""
        free = self._free_lanes[track]
        return heapq.heappop(free) if free else next(self._lanes[track])

    def give_lane_back(self, track: str, lane: int) -> None:
        """Make a lane free again."""
        heapq.heappush(self._free_lanes[track], lane)

    def add_span(
        self,
        name: str,
        track: str,
        lane: int,
        *,
        began_ns: int,
        duration_ns: int,
        about: Mapping[str, Json] | None = None,
    ) -> None:
        """Something took from `began_ns` on (of `time.monotonic_ns`) so long. Does nothing once closed."""
        if self._is_closed:
            return
        if self._is_full:
            self._dropped += 1
            return
        self._spans.append((name, track, lane, began_ns, duration_ns, about))
        ended_ns = began_ns + duration_ns
        if len(self._spans) >= _EVENTS_AT_ONCE or ended_ns - self._flushed_ns >= _HELD_NS:
            self._flushed_ns = ended_ns
            self.flush()

    def add_value(self, name: str, unit: str, at_ns: int, value: float) -> None:
        """A value over time: a curve of its own. Does nothing once closed."""
        at_us = self._unix_us(at_ns)
        self._submit([{"ph": "C", "name": name, "pid": self._pid, "ts": at_us, "args": {unit: value}}], 1)

    def flush(self) -> None:
        """Hand what was added to the thread that writes; never waits."""
        spans, self._spans = self._spans, []
        if spans:
            self._submit(self._events(spans), len(spans))

    def close(self) -> None:
        """Write what is left, and how much was left out. Blocks: call it off the loop. Closing twice does nothing."""
        if self._is_closed:
            return
        self.flush()
        self._is_closed = True
        if self._writer.close():
            with contextlib.suppress(OSError):  # of a disk that took nothing else either
                self._write_note()

    def _submit(self, events: Iterable[Mapping[str, Json]], count: int) -> None:
        """`count` of them are spans or values; the others say where these belong."""
        if self._is_closed:
            return
        if self._is_full or not self._writer.submit(lambda: self._write(events, count)):
            self._dropped += count

    def _write(self, events: Iterable[Mapping[str, Json]], count: int) -> None:
        """In the writer's thread."""
        lines = _ENCODER.encode_lines(events)
        if len(lines) > self._left_bytes:
            self._is_full = True
            self._dropped += count
            return
        try:
            self._append(self._before_next + lines)
        except OSError:  # it may have taken a part
            self._before_next = _AFTER_CUT_LINE
            self._dropped += count
            self._named.clear()
            raise
        self._before_next = b""
        self._left_bytes -= len(lines)

    def _write_note(self) -> None:
        if self._dropped:
            about: dict[str, Json] = {"dropped": self._dropped}
            note = {"ph": "M", "name": "trace_is_full", "pid": self._pid, "args": about}
            self._append(self._before_next + _line(note))

    def _append(self, lines: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(lines)

    def _events(self, spans: Sequence[_Span]) -> Iterator[Mapping[str, Json]]:
        for name, track, lane, began_ns, duration_ns, about in spans:
            tid = self._tids.setdefault((track, lane), len(self._tids) + 1)
            if tid not in self._named:
                self._named.add(tid)
                yield from self._track(tid, track, lane)
            began_us = self._unix_us(began_ns)
            event: dict[str, Json] = {
                "ph": "X",
                "name": name,
                "cat": track,
                "pid": self._pid,
                "tid": tid,
                "ts": began_us,
                "dur": self._unix_us(began_ns + duration_ns) - began_us,
            }
            if about:
                event["args"] = dict(about)
            yield event

    def _unix_us(self, monotonic_ns: int) -> int:
        """Whole, so that rounding never makes a span end behind the one around it: a float has too few digits here."""
        return (monotonic_ns + self._to_unix_ns) // 1_000

    def _track(self, tid: int, track: str, lane: int) -> Iterator[Mapping[str, Json]]:
        about: dict[str, Json] = {"ph": "M", "pid": self._pid, "tid": tid}
        yield {**about, "name": "thread_name", "args": {"name": f"{track} {lane}"}}
        group = list(self._lanes).index(track) if track in self._lanes else len(self._lanes)
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": group * 10_000 + lane}}


def open_trace(folder: Path, process: str, *, max_bytes: int) -> TraceWriter | None:
    """A process's part of the trace; None, and a warning, where no file can be written there."""
    try:
        return TraceWriter(folder, process, max_bytes=max_bytes)
    except OSError as error:
        _logger.warning("there will be no trace of this process: %s", error.strerror)
        return None


def join_trace(parts: Path, trace: Path) -> None:
    """Join the parts of a run's processes into one file and remove them. Blocks; raises `OSError`.

    A line that a killed process cut short is left out.
    """
    temporary = trace.with_name(trace.name + ".part")
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    with temporary.open("wb") as joined:
        for part in sorted(parts.glob("*" + _PART_SUFFIX)):
            with part.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"}\n"):
                        joined.write(separator + line[:-1])
                        separator = b",\n"
        joined.write(b"\n]}\n" if separator == b",\n" else separator + b"]}\n")
    os.replace(temporary, trace)
    remove_parts(parts)


def remove_parts(parts: Path) -> None:
    """Of an earlier start of the run, too. Their folder goes with them, unless somebody put a file of theirs there."""
    for part in parts.glob("*" + _PART_SUFFIX):
        part.unlink()
    with contextlib.suppress(OSError):
        parts.rmdir()


def _process_number(process: str, part_bytes: int) -> int:
    """One life of a process in the trace: process ids of two hosts, or of two containers, may be equal."""
    return zlib.crc32(f"{process} {part_bytes}".encode()) >> 1 or 1


def _line(event: Mapping[str, Json]) -> bytes:
    return _ENCODER.encode(event) + b"\n"


_ENCODER = msgspec.json.Encoder()
