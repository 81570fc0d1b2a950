"""What it costs to measure: a phase, and a turn of a task on the event loop, with and without a recorder.

    python benchmarks/phases.py [--json] [--quick] [--case phase ...]

`phase` enters and leaves one; `turn` lets a task wait and run again (`asyncio.sleep(0)`), which a recorder watches. The
least of many repetitions, each of 1,000: what the work itself takes, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
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
"""Between repetitions under a trace: what they hand over is written, and its queue is never full."""


@dataclass(frozen=True)
class Row:
    """The figures of one case, in seconds each."""

    case: str
    not_recorded_s: float
    recorded_s: float
    traced_s: float
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
            traced_s = await asyncio.create_task(least(work, repeats, pause_s=WRITING_S))
        await asyncio.to_thread(trace.close)
        assert written_spans(Path(folder)) == spans, "some were dropped, and cost less than those that are written"
    target = f"recorded <= {MAX_ADDED_S * 1e6:.0f} µs more"
    return Row(name, not_recorded_s, recorded_s, traced_s, target, recorded_s - not_recorded_s <= MAX_ADDED_S)


def written_spans(folder: Path) -> int:
    return sum(part.read_bytes().count(b'"ph":"X"') for part in folder.iterdir())


async def least(work: Callable[[], Awaitable[None]], repeats: int, *, pause_s: float = 0.0) -> float:
    best_s = float("inf")
    for _ in range(repeats):
        started_s = time.perf_counter()
        await work()
        best_s = min(best_s, time.perf_counter() - started_s)
        await asyncio.sleep(pause_s)
    return best_s / AT_ONCE


if __name__ == "__main__":
    main()
