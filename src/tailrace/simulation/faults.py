"""Fault search: small clusters in which everything that may fail does, each drawn from a seed and checked at its end.

    seed ─► Scenario ─► a simulated run ─► the laws that must hold ─► None, or what was broken

The laws: the ledger balances, and every rollout ends once; nothing beyond the staleness bound was trained on; every
batch but the last is full; no interruption cost a rollout; a task of the data set ends once, as trained where any of
its group was in a batch; no task and no request is left; nothing deadlocked; at the end of the data every slot of the
staleness budget is free; and after a run was killed and resumed, no task of a step that survived is trained on again,
and rollout ids are unique. A seed that breaks one replays exactly.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

import msgspec
from pydantic import ValidationError
from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.errors import NothingLeft, RolloutError, TrainingError
from tailrace.records import Group, GroupId, RolloutId, TaskId, TerminalState
from tailrace.scheduling import SchedulingSettings
from tailrace.scheduling.tasks import TaskStreamState
from tailrace.simulation.draws import uniform
from tailrace.simulation.environment import Disturbance
from tailrace.simulation.run import Simulation
from tailrace.simulation.settings import SimulationPlan
from tailrace.simulation.trainer import Checkpoint
from tailrace.simulation.virtual_time import run_in_virtual_time
from tailrace.timeouts import timeout

_LONGEST_S = 30 * 86_400.0
"""Virtual time after which a run counts as stuck."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How often things fail, as shares of the occasions."""

    environment_fails: float
    environment_hangs: float
    environment_is_slow: float
    judge_fails: float
    judge_hangs: float
    judge_discards: float
    judge_splits: float
    step_skipped: float
    trainer_restarts: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and what happens to it."""

    seed: int
    plan: SimulationPlan
    rates: Rates
    deaths_s: tuple[tuple[float, int], ...]
    """When which replica dies."""
    interruptions_s: tuple[float, ...]
    """When every replica interrupts all of its requests."""
    restart_s: float
    tasks: int | None
    """In the data set; None where the steps end the run."""
    killed_after_step: int | None
    """The run is killed after this step, and resumed from the checkpoint of the one before."""


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(seed)
    while True:
        try:
            plan = SimulationPlan.model_validate(_draw_plan(random, seed))
            break
        except ValidationError:
            continue  # a contradiction between policies
    rates = Rates(*(random.choice((0.0, 0.0, 0.03, 0.15)) for _ in Rates.__slots__))
    return Scenario(
        seed=seed,
        plan=plan,
        rates=rates,
        deaths_s=tuple(
            (random.uniform(0, 400), random.randrange(plan.engines.replicas))
            for _ in range(random.choice((0, 0, 1, 4, 12)))
        ),
        interruptions_s=tuple(random.uniform(0, 400) for _ in range(random.choice((0, 0, 0, 4)))),
        restart_s=random.choice((0.0, 5.0, 120.0)),
        tasks=random.choice((None, random.randrange(3, 20))),
        killed_after_step=random.choice((None, None, random.randrange(2, 6))),
    )


def _draw_plan(random: Random, seed: int) -> dict[str, Any]:
    group_size = random.choice((1, 2, 3, 4))
    groups = random.choice((1, 2, 4))
    scheduling: dict[str, Any] = {
        "batch_size": groups * group_size,
        "row_tokens": 8192,
        "max_staleness": random.choice((0, 0, 1, 2, 4)),
        "buffer_batches": random.choice((0.0, 0.5, 1.0, 3.0)),
        "max_retries": random.choice((0, 1, 2)),
        "min_group_size": random.choice((1, 2, 4)),
        "max_in_flight": random.choice((None, None, 1, 5)),
        "filter_zero_spread": group_size > 1,
    }
    scheduling |= _draw_policies(random)
    return {
        "seed": seed,
        "steps": random.randrange(3, 10),
        "warmup_steps": 0,
        "engines": {
            "replicas": random.choice((1, 2, 3)),
            "slots": random.choice((1, 3, 8)),
            "kv_capacity_tokens": random.choice((200, 1500, 100_000)),
            "router": {
                "policy": random.choice(("sticky", "least_loaded")),
                "loading_share": random.choice((0.3, 1.0)),
                "starved_deadline_s": 600.0,
            },
        },
        "trainer": {
            "train_s": random.choice((0.0, 3.0, 30.0)),
            "sync_s": random.choice((0.0, 1.0, 20.0)),
            "sync_holds_engines": random.random() < 0.5,
            "sync_holds_trainer": random.random() < 0.5,
        },
        "load": {
            "group_size": group_size,
            "turns": random.choice((1, 1, 2)),
            "prompt_tokens": random.choice((1, 40)),
            "max_tokens": 2000,
            "environment_s": random.choice((0.0, 2.0)),
            "timeout_s": random.choice((60.0, 900.0)),
            "pass_share": None if group_size == 1 else random.choice((None, 0.5)),
            "lengths": {"mean_log": 4.0, "sigma": 1.2, "task_sigma": random.choice((0.0, 0.8)), "cap": 3000},
        },
        "scheduling": scheduling,
    }


def _draw_policies(random: Random) -> dict[str, Any]:
    """One of the values of each setting that is a choice of policies."""
    names = ("on_stale", "on_straggler", "partial_groups", "group_release")
    drawn = {name: random.choice(get_args(SchedulingSettings.model_fields[name].annotation)) for name in names}
    return {**drawn, "over_sampling": random.choice((1.0, 1.0, 1.5, 2.0))}


# --- faults ------------------------------------------------------------------------------------------------------


class FaultyEnvironment(Disturbance):
    """Fails, hangs and is slow at the scenario's rates, drawn by name."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed, self._rates = scenario.seed, scenario.rates
        self._slow_s = 2 * scenario.plan.load.timeout_s / 3

    @override
    async def playing(self, rollout_id: RolloutId) -> None:
        rates = self._rates
        faults = (rates.environment_fails, rates.environment_hangs, rates.environment_is_slow)
        match self._fault("playing", rollout_id, *faults):
            case 0:
                raise ConnectionError("the tool's server went away")
            case 1:
                await asyncio.Event().wait()
            case 2:
                await asyncio.sleep(self._slow_s)

    @override
    async def scoring(self, group: Group) -> Group | list[Group] | None:
        rates = self._rates
        faults = (rates.judge_fails, rates.judge_hangs, rates.judge_discards, rates.judge_splits)
        match self._fault("scoring", group.group_id, *faults):
            case 0:
                raise ConnectionError("the judge went away")
            case 1:
                await asyncio.Event().wait()
            case 2:
                return None
            case 3:
                return _halves(group)
        return group

    def _fault(self, what: str, name: str, *rates: float) -> int | None:
        """The index of the fault that happens; None for none."""
        left = uniform(self._seed, what, name)
        for index, rate in enumerate(rates):
            left -= rate
            if left < 0:
                return index
        return None


def _halves(group: Group) -> list[Group]:
    middle = len(group.rollouts) // 2
    parts = (group.rollouts[:middle], group.rollouts[middle:])
    return [
        Group(group_id=GroupId(f"{group.group_id}/{index}"), task=group.task, rollouts=rollouts)
        for index, rollouts in enumerate(parts)
        if rollouts
    ]


def make_simulation(scenario: Scenario, *, steps: int, start: Checkpoint, keep_journal: bool = False) -> Simulation:
    """The scenario's run, or a part of it. Call it on a loop in virtual time."""
    rates, seed = scenario.rates, scenario.seed
    return Simulation(
        scenario.plan.model_copy(update={"steps": steps}),
        start=start,
        disturbance=FaultyEnvironment(scenario),
        skips=[step for step in range(1, 1000) if uniform(seed, "skip", step) < rates.step_skipped],
        hiccup=lambda step: 300.0 * (uniform(seed, "restart", step) < rates.trainer_restarts),
        restart_s=scenario.restart_s,
        tasks=scenario.tasks,
        watch=False,
        keep_journal=keep_journal,
    )


async def _disturb(scenario: Scenario, simulation: Simulation) -> None:
    """Kill and interrupt replicas at the scenario's times."""

    async def kill(at_s: float, replica: int) -> None:
        await asyncio.sleep(at_s)
        simulation.fleet.kill(replica)

    async def interrupt(at_s: float) -> None:
        await asyncio.sleep(at_s)
        await simulation.fleet.interrupt()

    async with asyncio.TaskGroup() as planned:
        for at_s, replica in scenario.deaths_s:
            planned.create_task(kill(at_s, replica), name=f"death of replica {replica}")
        for at_s in scenario.interruptions_s:
            planned.create_task(interrupt(at_s), name="interruption")


# --- laws --------------------------------------------------------------------------------------------------------


def run_scenario(scenario: Scenario, *, keep_journal: bool = False) -> tuple[list[str], list[str]]:
    """What was broken, and the journal. Raises what the run raises, `Deadlock` among it."""

    async def main() -> tuple[list[str], list[str]]:
        steps, killed_after = scenario.plan.steps, scenario.killed_after_step
        if killed_after is None or killed_after >= steps:
            simulation, broken = await _run_part(scenario, Checkpoint(), steps, keep_journal)
            return broken, simulation.observer.journal
        first, broken = await _run_part(scenario, Checkpoint(), killed_after, keep_journal)
        if first.trainer.step < killed_after:
            return broken, first.observer.journal
        start = first.checkpoints[killed_after - 1]
        second, more = await _run_part(scenario, start, steps, keep_journal)
        broken += [*more, *_trained_again(scenario, first, second, start.step)]
        if shared := first.observer.ended.keys() & second.observer.ended.keys():
            broken.append(f"{len(shared)} rollouts of the resumed run have ids that were used before")
        return broken, [*first.observer.journal, *second.observer.journal]

    return run_in_virtual_time(main())


async def _run_part(
    scenario: Scenario, start: Checkpoint, steps: int, keep_journal: bool
) -> tuple[Simulation, list[str]]:
    """Run up to `steps`; what was broken then."""
    simulation = make_simulation(scenario, steps=steps, start=start, keep_journal=keep_journal)
    disturbing = asyncio.create_task(_disturb(scenario, simulation), name="disturbance")
    ended_by_data = False
    try:
        async with timeout(_LONGEST_S):
            await simulation.run()
        ended_by_data = simulation.trainer.step < steps
    except NothingLeft:
        pass  # rewards are drawn, and may happen to be as high as any before
    except TrainingError as error:
        if "nothing to train on" not in str(error):
            raise
    finally:
        await cancelled(disturbing)
    return simulation, broken_laws(simulation, ended_by_data=ended_by_data)


def _trained_again(scenario: Scenario, first: Simulation, second: Simulation, survived: int) -> list[str]:
    """Tasks of the steps that survived the kill that were trained on once more."""
    # groups that are trained in parts may be started again for a part that was not trained
    if scenario.plan.scheduling.group_release == "early" or scenario.rates.judge_splits or scenario.tasks is None:
        return []
    before = {task for step, tasks in first.observer.trained_tasks.items() if step <= survived for task in tasks}
    again = before & set[TaskId]().union(*second.observer.trained_tasks.values())
    return [f"{len(again)} tasks were trained on again after the run was resumed"] if again else []


def broken_laws(simulation: Simulation, *, ended_by_data: bool) -> list[str]:
    """One sentence for each law that does not hold, now that the run has ended."""
    scheduler, observer = simulation.scheduler, simulation.observer
    ledger = scheduler.ledger
    broken = []
    if ledger.in_flight or ledger.admitted != sum(ledger.total(state) for state in TerminalState):
        broken.append(f"the ledger does not balance: {ledger}")
    observed = Counter(observer.ended.values())
    broken += [
        f"the ledger has {ledger.total(state)} {state}, the observer {observed[state]}"
        for state in (TerminalState.TRAINED, TerminalState.FILTERED, TerminalState.FAILED)
        if ledger.total(state) != observed[state]
    ]
    if observer.ended_twice:
        broken.append(f"these ended twice: {observer.ended_twice[:3]}")
    oldest = max((age for age, tokens in observer.staleness.items() if tokens), default=0)
    if oldest > simulation.plan.max_staleness:
        broken.append(f"a token of staleness {oldest} was trained on")
    if small := [size for size in _batch_sizes(simulation)[:-1] if size < simulation.plan.scheduling.batch_size]:
        broken.append(f"{len(small)} batches before the last are not full: {small[:5]}")
    broken += _ended_wrongly(simulation)
    if ledger.reasons(TerminalState.FAILED).get(RolloutError.reason):
        broken.append("an interruption cost a rollout")  # nothing else here fails for that reason
    if simulation.requests_left:
        broken.append(f"{simulation.requests_left} requests were left on the engines")
    if left := sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()):
        broken.append(f"tasks were left: {left[:5]}")
    if ended_by_data:
        budget = simulation.plan.scheduling.staleness_budget(simulation.plan.max_staleness)
        if scheduler.statistics.budget_free != budget:
            broken.append(f"{scheduler.statistics.budget_free} of {budget} slots of the budget are free at the end")
        if simulation.open_tasks:
            broken.append(f"{simulation.open_tasks} tasks have not ended at the end")
    return broken


def _ended_wrongly(simulation: Simulation) -> list[str]:
    """Whether other tasks than those in batches ended as trained, up to the newest checkpoint."""
    first, newest = (simulation.checkpoints[choose(simulation.checkpoints)] for choose in (min, max))
    sent = simulation.observer.batch_groups[: newest.step - first.step]
    in_batches = len({group_id for groups in sent for group_id in groups})
    trained = _tasks_trained(newest) - _tasks_trained(first)
    return [] if trained == in_batches else [f"{trained} tasks ended as trained, and {in_batches} were in batches"]


def _tasks_trained(checkpoint: Checkpoint) -> int:
    """Tasks that had ended so, since the run began."""
    if not checkpoint.scheduler_state:
        return 0
    state = msgspec.json.decode(checkpoint.scheduler_state, type=TaskStreamState)
    return sum(environment.trained for environment in state.mix.environments.values())


def _batch_sizes(simulation: Simulation) -> list[int]:
    """Rollouts that each batch counts for at most, with those that its groups lost; of a split group with all of it."""
    plan, batches = simulation.plan, simulation.observer.batch_groups
    if plan.scheduling.group_release == "early":
        return [len(groups) for groups in batches]
    return [plan.load.group_size * len({*groups}) for groups in batches]


def check_seed(seed: int) -> str | None:
    """What is broken under a seed; None where every law holds."""
    try:
        broken, _ = run_scenario(draw_scenario(seed))
    except Exception as error:  # noqa: BLE001  (any error is a finding)
        return f"{type(error).__name__}: {error}"
    return "; ".join(broken) or None
