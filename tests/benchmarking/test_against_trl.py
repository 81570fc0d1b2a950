"""What is counted of TRL's runs, and which of its settings are tried."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks import trl_sweep, vs_trl
from benchmarks.peers import Job, Outcome, Tuning


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`trl_peer.py`, which runs where TRL is installed, without TRL."""
    module = ModuleType("trl")
    for kind in ("GRPOConfig", "GRPOTrainer"):
        setattr(module, kind, type(kind, (), {}))
    monkeypatch.setitem(sys.modules, "trl", module)
    monkeypatch.delitem(sys.modules, "benchmarks.trl_peer", raising=False)
    yield importlib.import_module("benchmarks.trl_peer")
    sys.modules.pop("benchmarks.trl_peer", None)


def metered(peer: ModuleType, lengths: list[int], steps: int, max_tokens: int | None = None) -> tuple[Any, bool]:
    """After one generation and so many optimizer steps of 64; whether it asked to stop."""
    meter = peer.Meter(64, max_tokens)
    meter.function = lambda prompt, completion: 1.0
    messages = [[{"content": "a"}]] * len(lengths)
    ids = [[3] * length for length in lengths]
    meter.reward(messages, messages, ids, ["a"] * len(lengths))
    control = SimpleNamespace(should_training_stop=False)
    for step in range(1, steps + 1):
        state = SimpleNamespace(global_step=step)
        meter.on_step_begin(None, state, control)
        meter.on_step_end(None, state, control)
    return meter, control.should_training_stop


def test_of_a_generation_for_four_steps_one_step_has_trained_a_quarter(peer: ModuleType) -> None:
    meter, _ = metered(peer, [8, 12] * 128, steps=1)
    assert (meter.generated_tokens, meter.tokens) == (2560, 640)


def test_a_generation_that_is_used_up_has_trained_all_of_its_tokens(peer: ModuleType) -> None:
    meter, _ = metered(peer, [8, 12] * 127 + [7, 20], steps=4)
    assert meter.tokens == meter.generated_tokens == 2567


@pytest.mark.parametrize(("steps", "stops"), [(1, False), (2, True)])
def test_training_ends_at_enough_tokens_that_were_trained(peer: ModuleType, steps: int, stops: bool) -> None:
    _, stopped = metered(peer, [10] * 256, steps, max_tokens=1000)
    assert stopped is stops


def test_the_sweep_tries_the_other_allocator_with_the_best_of_all_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a batch of 8 our allocator is faster, with the best batch glibc's own."""
    tried: list[Tuning] = []

    def run_peer(job: Job, folder: Path, name: str, tuning: Tuning) -> Outcome:
        tried.append(tuning)
        rate = 1000 + 10 * tuning.micro_batch * (tuning.attention == "sdpa" and not tuning.continuous_batching)
        rate += (100 if tuning.micro_batch == 8 else -100) * tuning.has_our_allocator
        rate -= 500 * (tuning.steps_per_generation is not None)
        return Outcome(rate, rate, cpu_s=1.0, wall_s=1.0, mean_tokens=1.0, model=tmp_path)

    monkeypatch.setattr(trl_sweep, "run_peer", run_peer)
    monkeypatch.setattr(trl_sweep, "speed_job", lambda *_: None)
    monkeypatch.setattr(trl_sweep, "progress", lambda _: None)
    best = next(row for row in trl_sweep.sweep("natural-float32", tmp_path, 4) if row.best)
    assert (best.micro_batch, best.has_our_allocator) == (64, False)
    assert tried[-trl_sweep.FINALISTS * trl_sweep.FINAL_TURNS - 1] == Tuning(micro_batch=64)


def outcome(tokens_per_cpu_s: float) -> Outcome:
    return Outcome(1000, 1000, 1000 / tokens_per_cpu_s, wall_s=1.0, mean_tokens=200.0, model=Path())


def test_every_turn_has_a_seed_of_its_own_on_all_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def run(job: Job, *_: object, **__: object) -> Outcome:
        seeds.append(job.seed)
        return outcome(100.0)

    job = Job(tmp_path, tmp_path, "length", "float32", 1, 8, 64, max_tokens_per_completion=256, learning_rate=1e-7)
    monkeypatch.setattr(vs_trl, "speed_job", lambda *_: job)
    monkeypatch.setattr(vs_trl, "run_tailrace", run)
    monkeypatch.setattr(vs_trl, "run_peer", run)
    for turn in range(2):
        vs_trl.run_sides("natural-float32", turn, tmp_path, vs_trl.QUICK_STEPS)
    assert seeds == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("trl", "defaults", "ratio", "met"),
    [(100.0, 90.0, 2.5, True), (90.0, 100.0, 2.5, True), (90.0, 101.0, 2.48, False)],
)
def test_tailrace_is_held_against_the_better_of_trls_two_settings(
    trl: float, defaults: float, ratio: float, met: bool
) -> None:
    sides = (outcome(250.0), outcome(200.0), outcome(trl), outcome(2 * trl), outcome(defaults))
    row = vs_trl.speed_row("natural-float32", [vs_trl.Repeat(*sides)] * 3)
    assert (row.ratio, row.met) == (pytest.approx(ratio, abs=0.005), met)
    assert row.trl == max(trl, defaults)
    assert row.ratio_one_step == pytest.approx(200.0 / row.trl)


@pytest.mark.parametrize(("rates", "met"), [((250.0, 251.0, 100.0), True), ((249.0, 240.0, 400.0), False)])
def test_the_median_repeat_is_judged(rates: tuple[float, ...], met: bool) -> None:
    trl = outcome(100.0)
    repeats = [vs_trl.Repeat(outcome(rate), outcome(rate), trl, trl, outcome(50.0)) for rate in rates]
    assert vs_trl.speed_row("natural-float32", repeats).met is met
