"""Which processes `benchmarks/soak.py` looks at."""

from __future__ import annotations

import pytest

from tests.support.benchmark_programs import benchmark

soak = benchmark("soak")
RUN = {"orchestrator": 1e8, "trainer": 5e8, "generator": 4e8, "agent_worker_0": 6e7}


def records(sizes: dict[str, float], steps: int) -> list[dict[str, float]]:
    return [
        {"step": step, **{f"memory/{role}_rss_bytes": size for role, size in sizes.items()}} for step in range(steps)
    ]


def test_every_process_of_the_run_has_a_row_and_a_colour() -> None:
    sizes = soak.by_role(records(RUN, 20))
    assert sizes == {role: [size] * 20 for role, size in RUN.items()}
    assert {soak.row(role, of, 5).growth for role, of in sizes.items()} == {0.0}
    assert sizes.keys() == set(soak.ROLES)
    assert len(soak.COLOURS) == len(soak.ROLES)


def test_a_process_that_it_does_not_know_of_is_named() -> None:
    with pytest.raises(SystemExit, match="memory/agent_worker_1_rss_bytes"):
        soak.by_role(records({**RUN, "agent_worker_1": 6e7}, 20))
