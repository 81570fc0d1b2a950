"""Rollouts per second of agents that compute, over agent workers, and what they cost the orchestrator.

    python benchmarks/rollout_workers.py [--json] [--quick] [--case workers-2 ...]

The orchestrator as a run has it (observer, files, phases, router, event log), a simulated engine and a trainer that
does no work in processes of their own, and agents in 1 or 2 workers. `workers-N`: 64 rollouts of 4 turns at once, each
turn with 10 ms of Python work. `in-flight-4096`: as many rollouts of one turn over 2 workers.

`scaling` is the rate over that of `workers-1`. `orchestrator_cpu_s_per_turn` is user and system time of the
orchestrator's process over the turns of trained rollouts, from the end of the first step to that of the last: requests,
scheduling, batches and files counted with it. `loop_lag_max_s` is how much later than asked a sleeping task of its
event loop went on.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from composed_run import Marks, run_composed
from scheduler_overhead import Beat, run_case

from tailrace.config import RunSettings
from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.models.loading import tokenizer_folder
from tailrace.rollouts import ChatRenderer, LoadedEnvironment

TARGET_SCALING, TARGET_TURN_S, TARGET_LAG_S = 1.8, 300e-6, 0.050
WORK_S = 0.010
BEAT_S = 0.020
"""A task that wakes the loop more often than rollouts do would be the larger part of what is measured."""
GROUP_SIZE, BATCH_SIZE, MAX_TOKENS = 8, 32, 8


@dataclass(frozen=True)
class Case:
    """What is measured."""

    workers: int
    in_flight: int
    turns: int

    def rollouts(self, *, quick: bool) -> int:
        """Measured ones: half a minute's, or all that may be in flight; an eighth of that for a check."""
        if self.turns == 1:
            return self.in_flight // (8 if quick else 1)
        return max(self.in_flight, (4 if quick else 30) * 25 * self.workers)


CASES = {"workers-1": Case(1, 64, 4), "workers-2": Case(2, 64, 4), "in-flight-4096": Case(2, 4096, 1)}


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    workers: int
    in_flight: int
    rollouts: int
    rollouts_per_s: float
    scaling: float | None
    orchestrator_cpu_s_per_turn: float
    loop_lag_p99_s: float
    loop_lag_max_s: float
    target: float
    met: bool


def main() -> None:
    options = kit.parse_options(__doc__)
    measured: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        renderer = ChatRenderer(tokenizer_folder("bundled:quickstart", Path(folder)))
        for name in options.choose(list(CASES)):
            kit.progress(name)
            measured.append(run_case(measure(name, CASES[name], renderer, quick=options.quick)))
    kit.report("Agent workers", [judged(row, measured) for row in measured], options)


def judged(row: Row, measured: list[Row]) -> Row:
    """Two workers are judged by their scaling, every case by the orchestrator's time and lag."""
    alone = next((one.rollouts_per_s for one in measured if one.case == "workers-1"), None)
    is_scaled = row.case == "workers-2" and alone is not None
    scaling = row.rollouts_per_s / alone if alone is not None and row.case.startswith("workers") else None
    met = row.orchestrator_cpu_s_per_turn <= TARGET_TURN_S and row.loop_lag_p99_s <= TARGET_LAG_S
    if is_scaled and scaling is not None:
        met = met and scaling >= TARGET_SCALING
    return replace(row, scaling=scaling, target=TARGET_SCALING if is_scaled else TARGET_TURN_S, met=met)


def settings_of(case: Case) -> RunSettings:
    """Of a run whose trainer does no work and whose engine is simulated."""
    staleness = -(-2 * case.in_flight // BATCH_SIZE)
    return RunSettings.model_validate(
        {
            "name": "measured",
            "max_steps": 1_000_000,
            "placement": "rollout_worker_agents:WorkersLauncher",
            "model": {"name": "bundled:quickstart"},
            "environments": [{"name": "reverse-text"}],
            "rollouts": {"max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE, "agent_workers": case.workers},
            "scheduling": {
                "batch_size": BATCH_SIZE,
                "max_staleness": staleness,
                "max_in_flight": case.in_flight,
                "row_tokens": 8192,
            },
        }
    )


async def measure(name: str, case: Case, renderer: ChatRenderer, *, quick: bool) -> Row:
    """Waits until so many rollouts were trained, after the first batch."""
    settings, beat = settings_of(case), Beat(BEAT_S)
    arguments = {"turns": case.turns, "work_s": WORK_S}
    chosen = EnvironmentSettings(name="rollout_worker_agents:working", args=arguments)
    loaded = LoadedEnvironment.of(load_environment(chosen), settings.rollouts, chosen, is_apart=True)
    measured: list[tuple[float, int]] = []

    async def until(marks: Marks) -> None:
        await marks.reached(1)
        measured.append((time.perf_counter(), marks.trained))
        beat.lags.clear()  # of the start, when environments and tokenizers are loaded
        await marks.reached(marks.trained + case.rollouts(quick=quick))
        measured.append((time.perf_counter(), marks.trained))

    marks = await run_composed(settings, {"working": loaded}, renderer, until, beat.run())
    (began_s, before), (ended_s, after) = measured
    return Row(
        case=name,
        workers=case.workers,
        in_flight=case.in_flight,
        rollouts=after - before,
        rollouts_per_s=(after - before) / (ended_s - began_s),
        scaling=None,
        orchestrator_cpu_s_per_turn=marks.cpu_s_per_rollout / case.turns,
        loop_lag_p99_s=float(np.percentile(beat.lags, 99)),
        loop_lag_max_s=float(np.max(beat.lags)),
        target=TARGET_TURN_S,
        met=False,
    )


if __name__ == "__main__":
    main()
