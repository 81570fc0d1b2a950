"""What it costs to measure: a phase, and a turn of a task on the event loop, with and without a recorder.

    python benchmarks/phases.py [--json] [--quick] [--case phase ...]

`phase` enters and leaves one; `turn` lets a task wait and run again (`asyncio.sleep(0)`), which a recorder watches. The
least of many repetitions, each of 1,000: what the work itself takes, whatever else the machine does. Under a trace it
is the CPU time of all threads, and the median, since the thread that encodes and writes it works between repetitions.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from kit import parse_options, report

from tailrace.tracing.phases import PhaseRecorder, phase
from tailrace.tracing.traces import TraceWriter

AT_ONCE = 1_000
MAX_ADDED_S = 5e-6
SPAN_BYTES = 200
"""More than one takes in a trace."""
WRITING_S = 0.005
"""Behind each repetition under a trace: what it hands over is written, and its queue is never full."""


@dataclass(frozen=True)
class Row:
    """The figures of one case, in seconds each."""

    case: str
    not_recorded_s: float
    recorded_s: float
    traced_s: float
    """CPU time, that of the thread that writes the trace included."""
    target: str
    met: bool


async def phases() -> None:
    for _ in range(AT_ONCE):
        with phase("work"):
            pass


async def turns() -> None:
    for _ in range(AT_ONCE):
        await asyncio.sleep(0)


CASES = {"phase": phases, "turn": turns}
SPANS = {"phase": AT_ONCE, "turn": 0}
"""In a trace, of one repetition."""


def main() -> None:
    options = parse_options(__doc__)
    repeats = 50 if options.quick else 500
    rows = [asyncio.run(measure(name, repeats)) for name in options.choose(list(CASES))]
    report("What it costs to measure", rows, options)


async def measure(name: str, repeats: int) -> Row:
    work = CASES[name]
    not_recorded_s = await asyncio.create_task(least(work, repeats))
    with PhaseRecorder().recording():
        recorded_s = await asyncio.create_task(least(work, repeats))
    with tempfile.TemporaryDirectory() as folder:
        spans = repeats * SPANS[name]
        trace = TraceWriter(Path(folder), "benchmark", max_bytes=10_000 + spans * SPAN_BYTES)
        with PhaseRecorder(trace).recording():
            traced_s = await asyncio.create_task(of_all_threads(work, repeats))
        await asyncio.to_thread(trace.close)
        assert written_spans(Path(folder)) == spans, "some were dropped, and cost less than those that are written"
    return row(name, not_recorded_s, recorded_s, traced_s)


def row(name: str, not_recorded_s: float, recorded_s: float, traced_s: float) -> Row:
    target = f"recorded and traced <= {MAX_ADDED_S * 1e6:.0f} µs more"
    is_met = max(recorded_s, traced_s) - not_recorded_s <= MAX_ADDED_S
    return Row(name, not_recorded_s, recorded_s, traced_s, target, is_met)


def written_spans(folder: Path) -> int:
    return sum(part.read_bytes().count(b'"ph":"X"') for part in folder.iterdir())


async def least(work: Callable[[], Awaitable[None]], repeats: int) -> float:
    """Wall time."""
    best_s = float("inf")
    for _ in range(repeats):
        started_s = time.perf_counter()
        await work()
        best_s = min(best_s, time.perf_counter() - started_s)
        await asyncio.sleep(0)
    return best_s / AT_ONCE


async def of_all_threads(work: Callable[[], Awaitable[None]], repeats: int) -> float:
    """Median CPU time of the process, what is done in the pause behind each repetition included."""
    taken_s = []
    for _ in range(repeats):
        started_s = time.process_time()
        await work()
        await asyncio.sleep(WRITING_S)
        taken_s.append(time.process_time() - started_s)
    return statistics.median(taken_s) / AT_ONCE


if __name__ == "__main__":
    main()
