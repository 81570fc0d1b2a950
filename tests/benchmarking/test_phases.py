"""What `benchmarks/phases.py` times under a trace is written to it."""

from __future__ import annotations

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
