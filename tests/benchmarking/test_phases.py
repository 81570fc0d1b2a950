"""What `benchmarks/phases.py` times under a trace is written to it, and counted and judged with what writes it."""

from __future__ import annotations

import time
from threading import Thread

import pytest

from tests.support.benchmark_programs import benchmark

phases = benchmark("phases")


@pytest.mark.parametrize("case", phases.CASES)
async def test_nothing_that_is_timed_under_a_trace_is_dropped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    written_spans = phases.written_spans
    monkeypatch.setattr(phases, "written_spans", lambda folder: found.append(written_spans(folder)) or found[-1])
    await phases.measure(case, 150)  # whose trace is larger than the 10 MB that stood there
    assert found == [150 * phases.SPANS[case]]


async def test_a_trace_without_room_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "SPAN_BYTES", 10)
    with pytest.raises(AssertionError, match="dropped"):
        await phases.measure("phase", 20)


async def test_what_another_thread_does_behind_a_repetition_is_counted() -> None:
    writers: list[Thread] = []

    def write() -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.003:
            pass

    async def work() -> None:
        if writers:
            writers[-1].join()
        writers.append(Thread(target=write))
        writers[-1].start()

    assert await phases.of_all_threads(work, 9) * phases.AT_ONCE >= 0.003


@pytest.mark.parametrize(
    ("recorded_s", "traced_s", "met"), [(4e-6, 5e-6, True), (6e-6, 5e-6, False), (4e-6, 6e-6, False)]
)
def test_both_a_phase_that_is_recorded_and_one_that_is_traced_are_judged(
    recorded_s: float, traced_s: float, met: bool
) -> None:
    assert phases.row("phase", 0.5e-6, recorded_s, traced_s).met is met
