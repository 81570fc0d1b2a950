"""What `benchmarks/gateway.py` makes of its runs."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest

from tests.support.benchmark_programs import benchmark

gateway = benchmark("gateway")


@pytest.mark.parametrize(
    ("per_cpu_s", "tokens", "met"),
    [
        ([150.0, 110.0, 90.0], 30.0, True),
        ([150.0, 90.0, 95.0], 30.0, False),
        ([150.0, 110.0, 90.0], 28.0, None),
        ([150.0, 110.0, 90.0], 32.0, None),
    ],
)
def test_servers_that_sampled_other_numbers_of_tokens_are_not_judged(
    per_cpu_s: list[float], tokens: float, met: bool | None
) -> None:
    rates = {"tailrace": per_cpu_s, "vllm": [100.0] * 3}
    assert gateway.server_row(768, rates, {"tailrace": tokens, "vllm": 30.0}).met is met


async def test_what_each_server_sampled_is_counted_without_the_turn_that_warms_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_s, asked = itertools.count(), list[str]()

    async def clients(order: dict[str, Any]) -> dict[str, Any]:
        asked.append(order["port"])
        return {"turns": 6, "tokens": 6 * (500 if len(asked) <= 2 else 30 if order["port"] == 1 else 40)}

    monkeypatch.setattr(gateway, "clients", clients)
    monkeypatch.setattr(gateway, "tree_cpu_s", lambda _process: float(next(cpu_s)))
    monkeypatch.setattr(gateway, "tailrace_server", lambda *_: nullcontext(("http://x:1", None)))
    monkeypatch.setattr(gateway, "vllm_server", lambda *_, **__: nullcontext(("http://x:2", None)))
    row = await gateway.beside_vllm(rollouts=2, turns=3, runs=2)
    assert (row.ratio, row.tokens_per_request, row.vllm_tokens_per_request, row.met) == (1.0, 30.0, 40.0, None)


def run(gateway_ms: float, lag_ms: float) -> object:
    return gateway.Row("whole", 1, 1, {}, gateway_ms, 0.3, 1.0, lag_ms, gateway.LAG_MS, 100.0, met=True)


@pytest.mark.parametrize(
    ("runs", "met"),
    [
        ([(0.5, 5.0), (0.6, 6.0), (9.0, 90.0)], True),
        ([(0.5, 5.0), (1.1, 6.0), (1.2, 7.0)], False),
        ([(0.5, 5.0), (0.6, 11.0), (0.7, 12.0)], False),
    ],
)
def test_the_median_of_each_figure_is_judged(runs: list[tuple[float, float]], met: bool) -> None:
    row = gateway.median_row([run(*figures) for figures in runs])
    assert row.met is met
    assert row.ranges["lag_p99_ms"] == f"{runs[0][1]:.3g} to {runs[2][1]:.3g}"


@pytest.mark.parametrize(("lags_ms", "met"), [((5.0, 9.0, 30.0), True), ((5.0, 11.0, 12.0), False)])
def test_the_median_lag_of_clients_outside_is_judged(lags_ms: tuple[float, ...], met: bool) -> None:
    runs = [gateway.OutsideRow("outside", 1, 1, {}, 1.0, 0.0, lag_ms, 10.0, 190.0, met=True) for lag_ms in lags_ms]
    assert gateway.median_outside(runs).met is met
