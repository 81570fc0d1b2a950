"""Where the time goes: named phases around everything that happens to a rollout and a batch.

    with recorder.recording():            once per process: what runs in here is measured
        with phase("score"):              anywhere below, in coroutines and in threads; costs nothing where none records
            ...

A phase that awaits is charged only for what it ran itself. The tasks of a recording loop report when they run and when
they wait; in between, time goes to the phase that is in force in that task (a context variable, which child tasks and
`asyncio.to_thread` inherit). Time that no phase claims is counted as `OTHER`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from tailrace.records import Json
from tailrace.tracing.phase_totals import LONG_NS, PhaseTotals, PhaseUsage
from tailrace.tracing.traces import TraceWriter
from tailrace.tracing.watched_tasks import watching_task_factory

OTHER = "other"
"""What runs on the event loop outside of every phase."""

_CPU_FRESH_NS = 5_000_000
"""A reading of the CPU clock that is older is renewed when a turn begins. A stretch that turns out to be long is
charged with what the thread has computed since the last reading, at most: at worst with so much, and what its turn ran
before it, too much."""

_thread = threading.get_ident


class PhaseRecorder:
    """Adds up, for one process, what its phases took; with a `trace`, writes each of them down too."""

    def __init__(
        self,
        trace: TraceWriter | None = None,
        *,
        other: str = OTHER,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        cpu_clock_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """`other` is the name of what is in no phase."""
        self.trace, self._other = trace, other
        self._clock_ns, self._cpu_clock_ns = clock_ns, cpu_clock_ns
        self._clocks: dict[int, _Clock] = {}
        self._loop_clock: _Clock | None = None

    @contextmanager
    def recording(self) -> Iterator[PhaseRecorder]:
        """Measure what is started in this context, on the running event loop and in threads that inherit it."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        clock = self._loop_clock = self.clock()
        clock.is_loop, clock.turn = True, 0
        outermost = phase(self._other)
        outermost.enter_outermost(self)

        loop.set_task_factory(watching_task_factory(clock))
        try:
            yield self
        finally:
            loop.set_task_factory(before)
            outermost.leave_outermost()

    def clock(self) -> _Clock:
        """That of this thread."""
        thread = _thread()
        found = self._clocks.get(thread)
        if found is None:
            found = self._clocks[thread] = _Clock(self._clock_ns, self._cpu_clock_ns)
        return found

    @property
    def in_force(self) -> str:
        """The phase that holds the event loop now. From any thread."""
        clock = self._loop_clock
        return self._other if clock is None or clock.scope is None else clock.scope.name

    @property
    def turns(self) -> int:
        """How many turns tasks have taken on the event loop. From any thread."""
        clock = self._loop_clock
        return 0 if clock is None else clock.turn

    def held_ns(self) -> dict[str, int]:
        """How long each phase has held the event loop so far."""
        clock = self._loop_clock
        return {} if clock is None else {name: totals.held_ns for name, totals in list(clock.totals.items())}

    def flush(self) -> dict[str, PhaseUsage]:
        """What each phase took since the last flush; starts over."""
        usage: dict[str, PhaseUsage] = {}
        for clock in list(self._clocks.values()):
            for name, totals in list(clock.totals.items()):
                if (since := totals.flush()) is not None:
                    usage[name] = since if name not in usage else usage[name].merged(since)
        return usage


class _Clock:
    """One thread's: which phase is in force, and since when. Touched by that thread alone, but for reading."""

    __slots__ = (
        "_charged",
        "_cpu_ns",
        "_cpu_read_at_ns",
        "_cpu_read_ns",
        "_cpu_since_ns",
        "_since_ns",
        "is_loop",
        "now_ns",
        "runs",
        "scope",
        "totals",
        "turn",
    )

    def __init__(self, clock_ns: Callable[[], int], cpu_clock_ns: Callable[[], int]) -> None:
        self.now_ns, self._cpu_ns = clock_ns, cpu_clock_ns
        self.totals: dict[str, PhaseTotals] = {}
        self.is_loop = self.runs = False
        self.turn = -1
        """Counts the turns that tasks take on the event loop; -1 in a thread that runs none."""
        self.scope: phase | None = None
        self._charged: PhaseTotals | None = None
        """The totals of `scope`."""
        self._since_ns = 0
        self._cpu_since_ns = -1
        """Where the CPU clock stood when `scope` began; -1 where it was not read then."""
        self._cpu_read_at_ns, self._cpu_read_ns = clock_ns(), cpu_clock_ns()
        """When it was last read, and what it said."""

    def begin_turn(self) -> None:
        """A task runs."""
        scope = _scope.get()
        if scope is not None and scope.has_ended:
            scope = scope.surviving()
        self.turn += 1
        self.runs = True
        now_ns = self.now_ns()
        if now_ns - self._cpu_read_at_ns > _CPU_FRESH_NS:
            self._read_cpu(now_ns)
        self.start(scope, now_ns)

    def end_turn(self) -> None:
        """It waits, or has ended."""
        self.charge(self.now_ns())
        self.runs = False
        self.scope = self._charged = None

    def start(self, scope: phase | None, now_ns: int) -> None:
        """From now on time is that of `scope`."""
        self.scope = scope
        self._since_ns = now_ns
        if scope is None:
            self._charged = None
            return
        totals = self.totals.get(scope.name)
        if totals is None:
            totals = self.totals[scope.name] = PhaseTotals()
        self._charged = totals
        self._cpu_since_ns = self._read_cpu(now_ns) if totals.mean_ns > LONG_NS or not self.is_loop else -1

    def charge(self, now_ns: int) -> None:
        """Time until now was that of the scope in force."""
        totals = self._charged
        if totals is None:
            return
        used_ns = held_ns = now_ns - self._since_ns
        if self._cpu_since_ns >= 0:
            used_ns = self._read_cpu(now_ns) - self._cpu_since_ns
        elif held_ns > LONG_NS:  # one that is short is all computation: to ask the system would cost more than it
            before_ns = self._cpu_read_ns
            used_ns = min(held_ns, self._read_cpu(now_ns) - before_ns)
        totals.add(held_ns, used_ns, self.turn)

    def _read_cpu(self, now_ns: int) -> int:
        cpu_ns = self._cpu_read_ns = self._cpu_ns()
        self._cpu_read_at_ns = now_ns
        return cpu_ns


class phase:
    """A stretch of work that has a name; `with phase("score"): ...`, with or without awaits inside.

    Wall time is that of the phase less that of phases inside. What is nested in it in a trace lies in its lane; with a
    `track` it opens one of its own. `about` is shown beside it in the trace, and as `raised` the error or cancellation
    that ended it.
    """

    __slots__ = (
        "_about",
        "_began_ns",
        "_inside",
        "_inside_ns",
        "_lane",
        "_num_bytes",
        "_outer",
        "_owns_turn",
        "_recorder",
        "_shares_lane",
        "_track",
        "has_ended",
        "name",
    )

    def __init__(
        self, name: str, *, track: str | None = None, num_bytes: int = 0, about: Mapping[str, Json] | None = None
    ) -> None:
        self.name = name
        self.has_ended = False
        self._track, self._num_bytes, self._about = track, num_bytes, about
        self._recorder: PhaseRecorder | None = None
        self._outer: phase | None = None

    def __enter__(self) -> phase:
        outer = _scope.get()
        if outer is None:
            return self
        self._outer = outer = outer.surviving() if outer.has_ended else outer
        assert outer._recorder is not None
        self._recorder = recorder = outer._recorder
        self._inside = self._inside_ns = 0  # `_inside` is 1 while another phase lies in this one's lane
        self._lane, self._owns_turn = -1, False
        clock = recorder._clocks.get(_thread()) or recorder.clock()  # without a call, as a rule
        now_ns = clock.now_ns()
        if clock.runs:
            clock.charge(now_ns)
        elif not clock.is_loop:
            self._owns_turn = clock.runs = True
        self._take_lane(outer, recorder.trace, clock)
        _scope.set(self)
        if clock.runs:
            clock.start(self, now_ns)
        self._began_ns = now_ns
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, outer = self._recorder, self._outer
        if recorder is None or outer is None:
            return
        clock = recorder._clocks.get(_thread()) or recorder.clock()
        now_ns = clock.now_ns()
        self.has_ended = True
        if clock.runs:
            clock.charge(now_ns)
        self._sum_up(recorder.trace, clock, outer, now_ns - self._began_ns, kind)
        _scope.set(outer)
        if self._owns_turn:
            clock.runs, clock.scope, clock._charged = False, None, None
        elif clock.runs:
            clock.start(outer.surviving() if outer.has_ended else outer, now_ns)

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes that were worked on."""
        self._num_bytes += num_bytes

    def surviving(self) -> phase:
        """This phase, or the innermost around it that has not ended: a task may outlive the phase it began in."""
        scope = self
        while scope.has_ended and scope._outer is not None:
            scope = scope._outer
        return scope

    def enter_outermost(self, recorder: PhaseRecorder) -> None:
        """What is in no phase is in this one, and nothing shares its lane."""
        self._recorder, self._outer, self._inside, self._inside_ns, self._lane = recorder, _scope.get(), 1, 0, -1
        _scope.set(self)

    def leave_outermost(self) -> None:
        """The end of the recording."""
        _scope.set(self._outer)

    def _take_lane(self, outer: phase, trace: TraceWriter | None, clock: _Clock) -> None:
        """In one lane lies only what does not overlap: what begins beside another phase takes a lane of its own."""
        self._shares_lane = self._track is None and outer._inside == 0
        if self._shares_lane:
            self._track, self._lane = outer._track, outer._lane
            outer._inside = 1
        elif trace is not None:
            if self._track is None:
                self._track = outer._track or (self.name if clock.is_loop else threading.current_thread().name)
            self._lane = trace.take_lane(self._track)

    def _sum_up(
        self,
        trace: TraceWriter | None,
        clock: _Clock,
        outer: phase,
        duration_ns: int,
        raised: type[BaseException] | None,
    ) -> None:
        totals = clock.totals.get(self.name)
        if totals is None:  # it ran in no turn: in a callback, or in a task from before the recording
            totals = clock.totals[self.name] = PhaseTotals()
        totals.end(duration_ns - self._inside_ns, self._num_bytes)
        if self._shares_lane:
            outer._inside = 0
            outer._inside_ns += duration_ns
        if trace is not None and self._track is not None:
            about = self._about if raised is None else {**(self._about or {}), "raised": raised.__name__}
            trace.add_span(
                self.name, self._track, self._lane, began_ns=self._began_ns, duration_ns=duration_ns, about=about
            )
            if not self._shares_lane:
                trace.give_lane_back(self._track, self._lane)


_scope: contextvars.ContextVar[phase | None] = contextvars.ContextVar("tailrace_phase", default=None)
