"""A run's trace as columns: `trace.json` where the run has ended, the parts of its processes while it goes on.

Read once, then only what was appended: about 30 bytes a span, and a text for each rollout and request. Where a run has
more spans than are kept, those processes that have most keep as many as each other, the first ones, and all others keep
theirs.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.dashboard.tailing import Tail
from tailrace.guards import decoded
from tailrace.tracing.traces import TRACE_FILE

Spans: TypeAlias = NDArray[np.int64]
"""[n]: places of spans in the columns."""

_MOST_SPANS = 1_500_000
_KEPT_SPANS = _MOST_SPANS * 3 // 4
"""Once there are too many: the rest is room for what comes."""
_Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_UInt32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _Arguments(msgspec.Struct):
    """What is told beside a span or in metadata."""

    name: str = ""
    rollout: str = ""
    request: str = ""
    replica: str = ""
    raised: str = ""
    step: _Int32 = -1
    version: _Int32 = -1
    dropped: int = 0


class _TraceEvent(msgspec.Struct):
    """A line of a trace, as far as it is shown."""

    ph: str
    name: str
    pid: int = 0
    tid: _UInt32 = 0
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments | None = None


_DECODER = msgspec.json.Decoder(_TraceEvent)


@dataclass(slots=True)
class Columns:
    """[num_spans] each; times in seconds of the trace's clock."""

    began_s: array[float] = field(default_factory=lambda: array("d"))
    ended_s: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("H"))
    processes: array[int] = field(default_factory=lambda: array("H"))
    threads: array[int] = field(default_factory=lambda: array("I"))
    numbers: array[int] = field(default_factory=lambda: array("i"))
    """A step or a version; -1 where none was told."""


def trace_files(folder: Path) -> list[Path]:
    """The parts of a run's trace, or what they were joined to; none where there is none yet."""
    parts = sorted((folder / "trace").glob("*.events"))
    joined = folder / TRACE_FILE
    return parts or ([joined] if joined.is_file() else [])


class TraceSpans:
    """One run's. Not for several threads at once: take `lock`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._tails: dict[str, Tail] = {}
        self._columns = Columns()
        self._names: dict[str, int] = {}
        self._processes: dict[int, int] = {}
        self._counts: list[int] = []
        """Spans of each process."""
        self._most_of_one = _MOST_SPANS
        """Spans that a process may have."""
        self.process_names: list[str] = []
        self.texts: dict[int, str] = {}
        """Of a span: its rollout, request or replica."""
        self.raised = set[int]()
        """Spans that an error or a cancellation ended."""
        self.dropped = 0
        """Spans that a full trace did not take, or that are too many here."""
        self._arrays: dict[str, NDArray[Any]] = {}
        self._places: dict[tuple[str, ...], Spans] = {}

    def update(self) -> None:
        """Take in what was appended; where the run has joined its parts or was resumed, from the beginning."""
        paths = trace_files(self._folder)
        if set(self._tails) - {str(path) for path in paths}:
            self._start_over()
        for path in paths:
            tail = self._tails.setdefault(str(path), Tail(path))
            if tail.start_over_if_replaced():
                self._start_over()
                return self.update()
        before = len(self)
        for tail in self._tails.values():
            for line in tail.lines():
                self._add(line)
        if len(self) != before:
            self._arrays, self._places = {}, {}
        return None

    def _add(self, line: bytes) -> None:
        event = decoded(_DECODER.decode, line.removesuffix(b","))
        if event is None:
            return
        if event.ph == "X":
            self._add_span(event)
        elif event.ph == "M" and event.args is not None:
            if event.name == "process_name":
                self.process_names[self._process(event.pid)] = event.args.name
            self.dropped += event.args.dropped

    def _add_span(self, event: _TraceEvent) -> None:
        if len(self) >= _MOST_SPANS:
            self._make_room()
        process = self._process(event.pid)
        if self._counts[process] >= self._most_of_one:
            self.dropped += 1
            return
        self._counts[process] += 1
        columns = self._columns
        place = len(columns.began_s)
        columns.began_s.append(event.ts / 1e6)
        columns.ended_s.append((event.ts + event.dur) / 1e6)
        columns.names.append(self._names.setdefault(event.name, min(len(self._names), 65_535)))
        columns.processes.append(process)
        columns.threads.append(event.tid)
        number = -1
        if (args := event.args) is not None:
            number = args.step if args.step >= 0 else args.version
            if text := args.rollout or args.request or args.replica:
                self.texts[place] = text
            if args.raised:
                self.raised.add(place)
        columns.numbers.append(number)

    def _make_room(self) -> None:
        """Let go of the last spans of those processes that have most."""
        counts = np.array(self._counts)
        most = int(counts.max())
        while np.minimum(counts, most).sum() > _KEPT_SPANS:
            most = most * 15 // 16
        by_process = np.argsort(np.array(self._columns.processes), kind="stable")
        number_in_process = np.arange(len(by_process)) - np.repeat(np.cumsum(counts) - counts, counts)
        kept = np.sort(by_process[number_in_process < most])
        for column in fields(Columns):
            values = getattr(self._columns, column.name)
            setattr(self._columns, column.name, array(values.typecode, np.array(values)[kept].tobytes()))
        places = {place: number for number, place in enumerate(kept.tolist())}
        self.texts = {places[place]: text for place, text in self.texts.items() if place in places}
        self.raised = {places[place] for place in self.raised if place in places}
        self.dropped += len(by_process) - len(kept)
        self._counts, self._most_of_one = np.minimum(counts, most).tolist(), most
        self._arrays, self._places = {}, {}

    def _process(self, pid: int) -> int:
        number = self._processes.get(pid)
        if number is None:
            number = self._processes[pid] = len(self._processes)
            self._counts.append(0)
            self.process_names.append(f"process {pid}")
        return number

    def __len__(self) -> int:
        return len(self._columns.began_s)

    @property
    def began_s(self) -> NDArray[np.float64]:
        """[num_spans]."""
        return self._array("began_s", np.float64)

    @property
    def ended_s(self) -> NDArray[np.float64]:
        """[num_spans]."""
        return self._array("ended_s", np.float64)

    @property
    def numbers(self) -> NDArray[np.int32]:
        """[num_spans]: steps and versions."""
        return self._array("numbers", np.int32)

    @property
    def processes(self) -> NDArray[np.uint16]:
        """[num_spans]: places in `process_names`."""
        return self._array("processes", np.uint16)

    @property
    def threads(self) -> NDArray[np.uint32]:
        """[num_spans]."""
        return self._array("threads", np.uint32)

    def _array(self, name: str, kind: type[np.generic]) -> NDArray[Any]:
        """A copy: an array that is looked at cannot grow."""
        found = self._arrays.get(name)
        if found is None:
            found = self._arrays[name] = np.array(getattr(self._columns, name), kind)
        return found

    def named(self, *names: str) -> Spans:
        """Spans of these names, in order of their beginning."""
        found = self._places.get(names)
        if found is None:
            wanted = [self._names[name] for name in names if name in self._names]
            found = np.flatnonzero(np.isin(self._array("names", np.uint16), wanted))
            found = self._places[names] = found[np.argsort(self.began_s[found], kind="stable")]
        return found

    def name_of(self, spans: Spans) -> list[str]:
        """The name of each."""
        names = list(self._names)
        return [names[number] for number in self._array("names", np.uint16)[spans].astype(int).tolist()]

    def within(self, spans: Spans, from_s: float, to_s: float) -> Spans:
        """Those of them that reach into a stretch of time."""
        return spans[(self.ended_s[spans] >= from_s) & (self.began_s[spans] <= to_s)]

    def bounds(self) -> tuple[float, float]:
        """From the first rollout or step to the last; 0 and 0 without any."""
        shown = self.named("rollout", "train", "wait_for_batch", "request")
        if not len(shown):
            return 0.0, 0.0
        return float(self.began_s[shown].min()), float(self.ended_s[shown].max())

    def each(self, spans: Spans) -> Iterator[tuple[int, float, float]]:
        """Place, beginning and end of each."""
        return zip(spans.tolist(), self.began_s[spans].tolist(), self.ended_s[spans].tolist(), strict=True)
