"""All that an orchestrator does for a step: a composed run of rollouts of 20 turns, over peers that do no work.

In `step_boundary.py`'s other cases the parts that move bytes are called one by one. Here a run does everything between
the arrival of a completion and the sent batch: sockets, reading the reply, recording, rendering the next turn, scoring,
ledger, batching, observer and its files, phases and trace. Messages are text that a tokenizer splits; tokens come from
a process of their own, which puts routed experts into shared memory; a trainer's process makes tensors of each batch.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from composed_run import Marks, Metrics, run_composed
from scheduler_peers import EXPERT_LAYERS
from step_peers import TOP_K

from tailrace.config import RunSettings
from tailrace.environments import EnvironmentSpec, Policy
from tailrace.models.loading import tokenizer_folder
from tailrace.records import Task
from tailrace.replay.loop_load import LagSampler
from tailrace.reporting.phase_report import total_costs
from tailrace.rollouts import ChatRenderer, LoadedEnvironment

ROLLOUTS, TURNS, GROUP_SIZE, TOKENS = 64, 20, 8, 1016
WARM_STEPS = 2
_PHASES_SHOWN = 10
_WORDS = "red blue green one two three"


@dataclass(frozen=True)
class RunRow:
    """Of a step of a run after `WARM_STEPS`: means over the same steps, of which the phases make up the total."""

    case: str
    phase: str
    cpu_s: float
    """Of the orchestrator's process; for `trainer`, the median wall time until all tensors are ready. Short stretches
    of phases count in wall time: on a busy machine they come to more than the process took, and the rest to less than
    nothing."""
    cpu_us_per_turn: float
    share: float | None
    """Of the orchestrator's CPU time."""
    lag_p99_s: float | None = None
    lag_max_s: float | None = None
    expert_bytes: int | None = None


def spec(message: str) -> EnvironmentSpec:
    """Rollouts of so many turns, each after a message of `message`; rewards differ in every group."""
    played = 0

    async def agent(task: Task, policy: Policy) -> float:
        nonlocal played
        messages = [{"role": "user", "content": f"{task['text']} {message}"}]
        for _ in range(TURNS):
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": message}]
        played += 1
        return float(played % 2)

    rows = [{"text": str(number)} for number in range(4096)]
    return EnvironmentSpec(name="long", agent=agent, train_tasks=rows, trusted=True)


def settings(*, with_experts: bool) -> RunSettings:
    """Of a run that always has a batch's rollouts in flight."""
    return RunSettings.model_validate(
        {
            "name": "measured",
            "max_steps": 1_000_000,
            "placement": "scheduler_peers:PeersLauncher",
            "model": {"name": "bundled:quickstart"},
            "environments": [{"name": "reverse-text"}],
            "generator": {"return_routed_experts": with_experts, "max_cache_tokens": 65_536},
            "rollouts": {"max_tokens": TOKENS, "group_size": GROUP_SIZE, "max_turns": TURNS},
            "scheduling": {
                "batch_size": ROLLOUTS,
                "max_staleness": 2,
                "max_in_flight": ROLLOUTS,
                "row_tokens": 65_536,
            },
        }
    )


async def run_case(case: str, *, with_experts: bool, steps: int) -> list[RunRow]:
    """All of its rows."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = ChatRenderer(tokenizer_folder("bundled:quickstart", Path(folder)))
        chosen, environment = settings(with_experts=with_experts), spec(message_of(renderer))
        loaded = {environment.name: LoadedEnvironment.of(environment, chosen.rollouts)}
        lag = LagSampler()

        async def until(marks: Marks) -> None:
            await marks.reached(WARM_STEPS * ROLLOUTS)
            async with lag:
                await marks.reached(marks.trained + steps * ROLLOUTS)

        marks = await run_composed(chosen, loaded, renderer, until, first=WARM_STEPS)
    sampled = lag.statistics()
    expert_bytes = ROLLOUTS * TURNS * 2 * TOKENS * EXPERT_LAYERS * TOP_K if with_experts else None
    total = RunRow(
        case,
        "orchestrator",
        marks.cpu_s_per_rollout * ROLLOUTS,
        per_turn(marks.cpu_s_per_rollout * ROLLOUTS),
        None,
        lag_p99_s=sampled.p99_s,
        lag_max_s=sampled.max_s,
        expert_bytes=expert_bytes,
    )
    return [*phase_rows(case, marks.counted, total.cpu_s), total]


def phase_rows(case: str, metrics: Sequence[Metrics], total_s: float) -> Iterator[RunRow]:
    """The dearest phases, dearest first, what is left of `total_s`, and the trainer's time until tensors are ready."""
    columns = defaultdict[str, list[float]](list)
    for step in metrics:
        for name, value in step.items():
            columns[name].append(value)
    costs = {cost.name: cost.cost_s / len(metrics) for cost in total_costs(columns)}
    shown = dict(islice(costs.items(), _PHASES_SHOWN))
    for name, cost_s in {**shown, "everything else": total_s - sum(shown.values())}.items():
        yield RunRow(case, name, cost_s, per_turn(cost_s), cost_s / total_s)
    trained_s = statistics.median(step["training/step_s"] for step in metrics)
    yield RunRow(case, "trainer", trained_s, per_turn(trained_s), None)


def per_turn(seconds: float) -> float:
    """In microseconds."""
    return seconds / (ROLLOUTS * TURNS) * 1e6


def message_of(renderer: ChatRenderer) -> str:
    """A text of about as many tokens as a completion has."""
    each = len(renderer.tokenizer.encode(_WORDS + " "))
    return " ".join([_WORDS] * (TOKENS // each))
