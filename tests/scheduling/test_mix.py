"""Several environments in one run: the mix of what is trained follows the weights, whatever becomes of their tasks."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TrainingError
from tailrace.records import GroupId, PlannedBatch, Rollout, RolloutId, Task, TerminalState
from tailrace.scheduling import (
    EnvironmentMix,
    SchedulerSetup,
    SchedulingSettings,
    StreamScheduler,
    TaskSource,
    TaskStream,
)
from tailrace.scheduling.mix import MAX_TASKS_PER_TRAINED, UNTRAINABLE_AFTER, MixState
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import FAILURES, Recorder, ScriptedRunner, World, environment, make_rollout


class Flow:
    """Tasks drawn from a mix, at most so many in flight; each ends after its environment's delay, trained or not."""

    def __init__(
        self, weights: dict[str, float], yields: dict[str, float], delays: dict[str, int], slots: int = 48
    ) -> None:
        self.mix = EnvironmentMix(weights)
        self.yields, self.delays, self.slots = yields, delays, slots
        self.drawn: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.in_flight: deque[tuple[int, str]] = deque()
        self._random = random.Random(7)
        self._now = 0

    def run(self, ended: int) -> None:
        """Until so many tasks have ended."""
        for _ in range(ended):
            while len(self.in_flight) < self.slots:
                name = self.mix.draw(self.yields)
                self.mix.hand_out(name)
                self.drawn[name] += 1
                self.in_flight.append((self._now + self.delays[name], name))
            self.in_flight = deque(sorted(self.in_flight))
            self._now, name = self.in_flight.popleft()
            trained = self._random.random() < self.yields[name]
            self.trained[name] += trained
            self.mix.end(name, trained=trained)

    def trained_share(self, name: str) -> float:
        return self.trained[name] / self.trained.total()


def test_environments_that_always_train_are_drawn_by_weight() -> None:
    flow = Flow({"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1})
    flow.run(400)
    assert flow.trained_share("a") == pytest.approx(0.75, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    data=st.data(),
)
def test_what_is_trained_follows_the_weights_whatever_is_slow_or_filtered(
    weights: list[int], data: st.DataObject
) -> None:
    names = [f"e{index}" for index in range(len(weights))]
    yields = {name: data.draw(st.sampled_from([0.2, 0.4, 0.7, 1.0])) for name in names}
    delays = {name: data.draw(st.sampled_from([1, 5, 40])) for name in names}
    flow = Flow({name: float(weight) for name, weight in zip(names, weights, strict=True)}, yields, delays)
    flow.run(4000)
    for name, weight in zip(names, weights, strict=True):
        assert flow.trained_share(name) == pytest.approx(weight / sum(weights), abs=0.05)


def test_a_slow_environment_is_not_drawn_again_for_what_is_on_its_way() -> None:
    flow = Flow({"slow": 1, "fast": 1}, {"slow": 1, "fast": 1}, {"slow": 1000, "fast": 1})
    flow.run(24)  # the fast half of the slots, once
    assert flow.drawn["slow"] <= flow.drawn["fast"] + 1


def test_an_environment_that_never_trains_gets_its_weights_share_of_the_tasks_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = Flow({"hopeless": 1, "good": 3}, {"hopeless": 0, "good": 1}, {"hopeless": 1, "good": 1})
    with caplog.at_level(logging.WARNING, logger="tailrace"):
        flow.run(200)
        before = flow.drawn.copy()
        flow.run(2000)
    later = flow.drawn - before
    assert later["hopeless"] / later.total() == pytest.approx(0.25, abs=0.01)
    assert flow.mix.figures["hopeless"].untrainable_tasks > 400
    assert [record.message for record in caplog.records] == [
        f"nothing of the last {UNTRAINABLE_AFTER} tasks of environment 'hopeless' could be trained on: it gets no "
        "more than its weight's share of the tasks handed out, until something can"
    ]


def test_an_environment_that_trains_now_and_then_is_told_once_until_it_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(trained: Iterable[bool]) -> list[str]:
        caplog.clear()
        for one in trained:
            mix.hand_out("late")
            mix.end("late", trained=one)
        return [record.levelname for record in caplog.records]

    mix = EnvironmentMix({"late": 1.0})
    now_and_then = [*[False] * UNTRAINABLE_AFTER, *([True, *[False] * UNTRAINABLE_AFTER] * 30)]
    with caplog.at_level(logging.INFO, logger="tailrace"):
        assert told(now_and_then) == ["WARNING"]
        state = msgspec.json.encode(mix.state())
        mix.restore(msgspec.json.decode(state, type=MixState))
        assert told(now_and_then) == []
        assert told([True] * 64) == ["INFO"]
        assert told([False] * UNTRAINABLE_AFTER) == ["WARNING"]


def test_an_environment_that_recovers_does_not_make_up_for_its_untrainable_time() -> None:
    flow = Flow({"late": 1, "good": 1}, {"late": 0, "good": 1}, {"late": 1, "good": 1})
    flow.run(2000)
    flow.yields["late"] = 1
    before = flow.trained.copy()
    flow.run(400)
    later = flow.trained - before
    assert later["late"] / later.total() == pytest.approx(0.5, abs=0.1)


def test_an_environment_that_rarely_trains_is_drawn_more_within_the_limit() -> None:
    flow = Flow({"rare": 1, "good": 1}, {"rare": 1 / 20, "good": 1}, {"rare": 1, "good": 1})
    flow.run(6000)
    assert flow.drawn["rare"] > flow.drawn["good"]
    assert flow.drawn["rare"] < 1.2 * MAX_TASKS_PER_TRAINED * flow.drawn["good"]
    assert 0 < flow.trained_share("rare") < 0.5


def test_its_state_survives_a_checkpoint_exactly() -> None:
    flow = Flow({"a": 2, "b": 1}, {"a": 0.3, "b": 0.9}, {"a": 3, "b": 11})
    flow.run(500)
    while flow.in_flight:
        flow.mix.end(flow.in_flight.popleft()[1], trained=False)
    restored = EnvironmentMix({"a": 2, "b": 1})
    written = msgspec.json.encode(flow.mix.state())
    restored.restore(msgspec.json.decode(written, type=MixState))
    for number in range(300):
        name = flow.mix.draw(flow.yields)
        assert restored.draw(flow.yields) == name
        for mix in (flow.mix, restored):
            mix.hand_out(name)
            mix.end(name, trained=number % 3 > 0)
    assert restored.figures == flow.mix.figures


def trained_under(weights: dict[str, float], tasks: int) -> MixState:
    """What a checkpoint keeps of a mix that has trained so many tasks, with nothing in flight."""
    flow = Flow(weights, {"large": 1, "small": 1}, {"large": 1, "small": 1}, slots=1)
    flow.run(tasks)
    return msgspec.json.decode(msgspec.json.encode(flow.mix.state()), type=MixState)


def drawn_next(mix: EnvironmentMix, draws: int) -> Counter[str]:
    drawn: Counter[str] = Counter()
    for _ in range(draws):
        name = mix.draw(("large", "small"))
        drawn[name] += 1
        mix.hand_out(name)
        mix.end(name, trained=True)
    return drawn


def test_weights_that_are_changed_on_resume_are_what_is_drawn_from_there_on(caplog: pytest.LogCaptureFixture) -> None:
    state = trained_under({"large": 9, "small": 1}, 5000)
    mix = EnvironmentMix({"large": 1, "small": 9})
    with caplog.at_level(logging.INFO, logger="tailrace"):
        mix.restore(state)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the environments' weights are not those of before"
    ]
    assert mix.figures["large"].trained == pytest.approx(4500, abs=10)  # what was trained stays what was trained
    assert drawn_next(mix, 200)["large"] == pytest.approx(20, abs=2)
    again = msgspec.json.decode(msgspec.json.encode(mix.state()), type=MixState)
    resumed = EnvironmentMix({"large": 1, "small": 9})
    resumed.restore(again)
    assert resumed.state() == mix.state()


def test_weights_of_the_same_shares_leave_the_history_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    mix = EnvironmentMix({"small": 0.3, "large": 2.7})
    with caplog.at_level(logging.INFO, logger="tailrace"):
        mix.restore(trained_under({"large": 9, "small": 1}, 503))
    assert mix.state().environments == trained_under({"large": 9, "small": 1}, 503).environments
    assert caplog.records == []


def test_a_checkpoint_without_shares_is_gone_on_with_as_it_is() -> None:
    written = msgspec.to_builtins(trained_under({"large": 9, "small": 1}, 5000))
    del written["shares"]
    mix = EnvironmentMix({"large": 1, "small": 9})
    mix.restore(msgspec.convert(written, MixState))
    assert drawn_next(mix, 200)["large"] < 10  # it makes up for the whole history, as before


@dataclass
class MixedRunner(ScriptedRunner):
    """The fate of a rollout by its environment and its number there."""

    fates: dict[str, Callable[[int], str | float]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        number = self.numbers[task.environment]
        self.numbers[task.environment] += 1
        for _ in range(40 if task.environment == "slow" else 1):
            await asyncio.sleep(self.pause_s)
        fate = self.fates[task.environment](number)
        if isinstance(fate, str):
            raise FAILURES[fate]("scripted")
        return make_rollout(task, group_id, rollout_id, reward=fate, version=self.version())


def mixed_world(
    fates: dict[str, Callable[[int], str | float]],
    *,
    weights: dict[str, float] | None = None,
    group_sizes: dict[str, int] | None = None,
    batch_size: int = 8,
    step: int = 0,
    state: bytes = b"",
    **settings: object,
) -> tuple[World, TaskStream]:
    runner, recorder = MixedRunner(lambda number: 0.0, fates=fates), Recorder()
    batches: asyncio.Queue[PlannedBatch] = asyncio.Queue()
    sources = [TaskSource(environment(name, rows=31), weight=(weights or {}).get(name, 1.0)) for name in fates]
    tasks = TaskStream(sources, seed=0)
    states: dict[int, bytes] = {}

    async def save_state(step: int, state: bytes) -> None:
        states[step] = state

    scheduler = StreamScheduler(
        tasks,
        runner,
        batches.put,
        recorder,
        SchedulerSetup(
            settings=SchedulingSettings.model_validate({"batch_size": batch_size, "row_tokens": 64, **settings}),
            max_staleness=4,
            max_running=24,
            group_sizes={name: (group_sizes or {}).get(name, 4) for name in fates},
            save_state=save_state,
        ),
    )
    scheduler.start(step=step, version=step, serving_version=step, state=state)
    world = World(scheduler, runner, recorder, batches, max_staleness=4, version=step, serving=step, states=states)
    runner.version = lambda: world.serving
    return world, tasks


def trained_groups(world: World) -> Counter[str]:
    """In batches, by environment."""
    return Counter(group.group.task.environment for formed in world.recorder.formed for group in formed.groups)


def differing(number: int) -> float:
    return float(number % 2)


def filtered_three_times_in_four(number: int) -> float:
    """Groups of four: of four groups only the last has rewards that differ."""
    return differing(number) if number // 4 % 4 == 3 else 1.0


async def test_batches_hold_the_configured_mix_of_slow_filtered_and_failing_environments() -> None:
    fates: dict[str, Callable[[int], str | float]] = {
        "slow": differing,
        "filtered": filtered_three_times_in_four,
        "failing": lambda number: "timeout" if number % 3 == 0 else differing(number),
    }
    world, tasks = mixed_world(fates, weights={"slow": 2, "filtered": 1, "failing": 1})
    await world.run_steps(200)
    trained = trained_groups(world)
    for name, share in (("slow", 0.5), ("filtered", 0.25), ("failing", 0.25)):
        assert trained[name] / trained.total() == pytest.approx(share, abs=0.04)
        assert tasks.environments[name].trained_share == pytest.approx(trained[name] / trained.total(), abs=0.01)


async def test_an_environment_without_anything_trainable_leaves_the_others_their_share() -> None:
    world, tasks = mixed_world({"hopeless": lambda number: 1.0, "good": differing})
    await world.run_steps(100)
    assert set(trained_groups(world)) == {"good"}
    filtered = world.scheduler.ledger.reasons(TerminalState.FILTERED)["zero_spread"]
    assert filtered < 1.5 * world.scheduler.ledger.total(TerminalState.TRAINED)
    assert tasks.environments["hopeless"].untrainable_tasks > 0


def test_a_run_of_nothing_but_hopeless_environments_ends_with_the_reason() -> None:
    async def run() -> None:
        world, _ = mixed_world({"hopeless": lambda number: 1.0, "broken": lambda number: "timeout"})
        world.runner.pause_s = 1.0
        with pytest.raises(ExceptionGroup) as caught:
            await world.run()
        says = r"environment 'broken' has failed for 3\d\d s .* all rewards are 1: .* filtered: \d+ zero_spread"
        assert caught.group_contains(TrainingError, match=says, depth=None)

    run_in_virtual_time(run())


async def test_group_sizes_may_differ_between_environments() -> None:
    world, _ = mixed_world(
        {"small": differing, "large": differing, "odd": differing},
        group_sizes={"small": 2, "large": 6, "odd": 3},
        batch_size=12,
    )
    await world.run_steps(60)
    trained = trained_groups(world)
    for name in ("small", "large", "odd"):
        assert trained[name] / trained.total() == pytest.approx(1 / 3, abs=0.05)
    sizes = [formed.batch.summary.num_rollouts for formed in world.recorder.formed]
    assert all(12 <= size < 12 + 6 for size in sizes)  # closes with the group that fills it
    world.scheduler.ledger.check()


async def test_a_resumed_run_keeps_the_mix_of_its_whole_history() -> None:
    fates: dict[str, Callable[[int], str | float]] = {"slow": differing, "filtered": filtered_three_times_in_four}
    first, _ = mixed_world(fates)
    await first.run_steps(50)
    state = first.states[50]
    second, tasks = mixed_world(fates, step=50, state=state)
    assert sum(figures.trained for figures in tasks.environments.values()) == sum(
        len(formed.groups) for formed in first.recorder.formed[:50]
    )
    await second.run_steps(100)
    trained = trained_groups(second) + Counter(
        group.group.task.environment for formed in first.recorder.formed[:50] for group in formed.groups
    )
    assert trained["slow"] / trained.total() == pytest.approx(0.5, abs=0.04)
