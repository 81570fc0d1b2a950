"""Evaluations beside training: which are made, in how many slots, and what their results say."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tailrace.errors import EngineFailed, RequestRefused, WorkerLost
from tailrace.records import Group, GroupId, Rollout, RolloutId, Task, TaskId
from tailrace.scheduling import (
    Evaluation,
    EvaluationResult,
    EvaluationSettings,
    Evaluator,
    SchedulingSettings,
    evaluate,
)
from tailrace.scheduling.backoff import FAILURES_IN_A_ROW, LONGEST_PAUSE_S
from tailrace.scheduling.groups import UNSCORED
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import FAILURES, environment, make_rollout


class HeldOut:
    """Held-out tasks of two environments, a runner that waits to be let go, and what an evaluator did with them."""

    def __init__(self, *, tasks: int = 6, max_running: int = 8, share: float = 0.25, **settings: object) -> None:
        self.tasks = [
            spec.train_task(index)
            for spec in (environment("a", tasks), environment("b", tasks))
            for index in range(tasks // 2)
        ]
        self.version = 0
        self.installed = 0
        self.has_ended = False
        self.lent: list[int] = []
        self.results: list[Evaluation] = []
        self.running = self.most_running = 0
        self.group_ids: list[str] = []
        self.scored: list[str] = []
        self.fate: dict[str, str | Exception] = {}
        self.going = asyncio.Event()
        self.going.set()
        self.changed = asyncio.Event()
        self.evaluator = Evaluator(
            self.tasks,
            self,
            self.results.append,
            settings=EvaluationSettings.model_validate({"every_steps": 2, "share": share, **settings}),
            scheduling=SchedulingSettings(),
            max_running=max_running,
            lend=self.lent.append,
        )

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[Evaluator]:
        running = asyncio.create_task(self.evaluator.run(self.wait_installed))
        try:
            yield self.evaluator
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        self.group_ids.append(group_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.going.wait()
            await asyncio.sleep(0)
            fate = self.fate.get(task.task_id, "")
            if isinstance(fate, Exception):
                raise fate
            if fate and fate != UNSCORED:
                raise FAILURES[fate]("scripted")
            rollout = make_rollout(task, group_id, rollout_id, reward=float(task["n"]), version=self.version)
            if fate == UNSCORED:
                rollout.reward = None
            return rollout
        finally:
            self.running -= 1

    async def score(self, group: Group) -> list[Group]:
        self.scored.append(group.task.task_id)
        return [group]

    async def wait_installed(self, version: int) -> bool:
        while self.installed < version and not self.has_ended:
            self.changed.clear()
            await self.changed.wait()
        return self.installed >= version

    def install(self, version: int) -> None:
        self.installed = self.version = version
        self.changed.set()

    def end(self) -> None:
        """No more weights come."""
        self.has_ended = True
        self.changed.set()


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


async def test_results_are_told_by_environment_and_lost_rollouts_counted() -> None:
    held_out = HeldOut()
    held_out.fate = {"a/train/1": "timeout", "b/train/0": RequestRefused("too long")}
    results = await evaluate(held_out.tasks, held_out, SchedulingSettings(), concurrency=2)
    assert results["a"].rewards == [0.0, 2.0]
    assert results["a"].failed == {"timeout": 1}
    assert results["b"].failed == {"request_refused": 1}
    assert results["b"].mean_reward == 1.5


class Flaky(HeldOut):
    """Attempts raise what `failing` says of their task, number and second; a rollout takes a second."""

    def __init__(
        self, failing: Callable[[Task, int, float], Exception | None], *, max_running: int = 8, **settings: object
    ) -> None:
        super().__init__(tasks=64, max_running=max_running, **settings)
        self._failing = failing

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        if error := self._failing(task, attempt, asyncio.get_running_loop().time()):
            raise error
        await asyncio.sleep(1.0)
        return await super().run(task, group_id=group_id, rollout_id=rollout_id, attempt=attempt)

    def evaluated(self, **settings: object) -> tuple[dict[str, EvaluationResult], float]:
        """The results, and how many seconds it took."""

        async def run() -> tuple[dict[str, EvaluationResult], float]:
            scheduling = SchedulingSettings.model_validate(settings)
            results = await evaluate(self.tasks, self, scheduling, concurrency=16)
            return results, asyncio.get_running_loop().time()

        return run_in_virtual_time(run())


@pytest.mark.parametrize(("max_retries", "failed"), [(1, {"timeout": 2}), (2, {})])
def test_a_rollout_that_fails_is_tried_again_as_often_as_in_training(max_retries: int, failed: dict[str, int]) -> None:
    def failing(task: Task, attempt: int, now_s: float) -> Exception | None:
        return FAILURES["timeout"]("slow") if int(task["n"]) % 16 == 0 and attempt < 2 else None

    results, _ = Flaky(failing).evaluated(max_retries=max_retries)
    assert [result.failed for result in results.values()] == [failed, failed]


@pytest.mark.parametrize("outage_s", [1.5, 90.0])
def test_an_outage_costs_some_rollouts_and_not_the_evaluation(outage_s: float) -> None:
    def failing(task: Task, attempt: int, now_s: float) -> Exception | None:
        return FAILURES["environment_failed"]("away") if 0.5 < now_s < 0.5 + outage_s else None

    results, lasted_s = Flaky(failing).evaluated(max_retries=1)
    for result in results.values():
        assert sum(result.failed.values()) <= FAILURES_IN_A_ROW // 2
        assert len(result.rewards) == 32 - sum(result.failed.values())
    assert lasted_s < 10.0 + outage_s + LONGEST_PAUSE_S


def test_an_outage_without_end_ends_the_evaluation_after_its_time() -> None:
    results, lasted_s = Flaky(lambda *_: FAILURES["environment_failed"]("away")).evaluated(max_failing_s=100.0)
    assert [result.failed for result in results.values()] == [{"environment_failed": 32}] * 2
    assert 100.0 <= lasted_s <= 2 * (100.0 + LONGEST_PAUSE_S)  # the two environments may be away one after the other


def test_an_outage_holds_up_no_other_environment() -> None:
    ended_s: list[float] = []

    def failing(task: Task, attempt: int, now_s: float) -> Exception | None:
        if task.environment == "a" and now_s < 200.0:
            return FAILURES["environment_failed"]("away")
        if task.environment == "b":
            ended_s.append(now_s + 1.0)
        return None

    results, _ = Flaky(failing).evaluated()
    assert len(results["b"].rewards) == len(ended_s) == 32
    assert max(ended_s) < 10.0
    assert len(results["a"].rewards) == 32 - sum(results["a"].failed.values()) >= 32 - FAILURES_IN_A_ROW


@pytest.mark.parametrize("outage_s", [100.0, math.inf], ids=["that ends", "that lasts"])
def test_in_an_outage_one_rollout_tries_and_the_others_wait_for_it(outage_s: float) -> None:
    began_s: list[float] = []

    def failing(task: Task, attempt: int, now_s: float) -> Exception | None:
        if task.environment == "a":
            began_s.append(now_s)
        return FAILURES["environment_failed"]("away") if task.environment == "a" and now_s < outage_s else None

    results, lasted_s = Flaky(failing).evaluated(max_failing_s=300.0)
    assert Counter(now_s for now_s in began_s if 0 < now_s < min(outage_s, 300.0)).most_common(1)[0][1] == 1
    if outage_s < 300.0:
        first_s = next(now_s for now_s in began_s if now_s >= outage_s)
        assert began_s.count(first_s) == 1
        assert began_s.count(first_s + 1.0) > 1  # it had come back
        assert len(results["a"].rewards) >= 32 - FAILURES_IN_A_ROW
    else:
        assert results["a"].failed == {"environment_failed": 32}
        assert lasted_s == pytest.approx(300.0)


@pytest.mark.parametrize("error", [RequestRefused("too long"), WorkerLost("out of memory")])
def test_one_that_cannot_be_played_leaves_the_turn_to_others(error: RequestRefused | WorkerLost) -> None:
    tried: list[TaskId] = []

    def failing(task: Task, attempt: int, now_s: float) -> Exception | None:
        if task.environment == "b":
            return None
        if now_s < 10.0:
            return FAILURES["environment_failed"]("away")
        tried.append(task.task_id)
        return error if task.task_id == tried[0] else None

    results, lasted_s = Flaky(failing).evaluated(max_retries=2)
    assert results["a"].failed[error.reason] == 1
    assert lasted_s < 60.0


def test_a_result_tells_what_the_newest_that_was_lost_failed_by() -> None:
    results, _ = Flaky(
        lambda task, *_: FAILURES["mistake"](f"{task.task_id}: KeyError\nTraceback") if task.index == 0 else None
    ).evaluated()
    assert [(result.failure, result.num_lost) for result in results.values()] == [
        ("a/train/0: KeyError", 1),
        ("b/train/0: KeyError", 1),
    ]


def test_code_that_is_wrong_is_not_waited_for() -> None:
    results, lasted_s = Flaky(lambda *_: FAILURES["mistake"]("KeyError: 'choices'")).evaluated()
    assert [result.failed for result in results.values()] == [{"environment_failed": 32}] * 2
    assert lasted_s == 0.0


async def test_what_is_kept_without_a_reward_is_counted() -> None:
    held_out = HeldOut()
    held_out.fate = {"a/train/1": UNSCORED}
    results = await evaluate(held_out.tasks, held_out, SchedulingSettings(), concurrency=2)
    assert (results["a"].rewards, results["a"].failed) == ([0.0, 2.0], {UNSCORED: 1})
    assert len(results["a"].rollouts) == 3
    assert results["b"].failed == {}


async def test_only_a_rollout_without_a_reward_of_its_own_is_scored_as_a_group() -> None:
    held_out = HeldOut()
    held_out.fate = {"a/train/1": UNSCORED, "a/train/2": "timeout"}
    await evaluate(held_out.tasks, held_out, SchedulingSettings(), concurrency=2)
    assert held_out.scored == ["a/train/1"]


async def test_an_environment_whose_rollouts_are_all_lost_has_no_reward() -> None:
    held_out = HeldOut(tasks=2)
    held_out.fate = {"a/train/0": "timeout"}
    result = (await evaluate(held_out.tasks, held_out, SchedulingSettings(), concurrency=2))["a"]
    assert math.isnan(result.mean_reward)
    assert result.policy_versions is None


async def test_an_evaluation_falls_due_every_so_many_steps() -> None:
    held_out = HeldOut()
    async with held_out.evaluating() as evaluator:
        for step in range(6):
            held_out.install(step)
            evaluator.step_ended(step, version=step)
            await settle()
    assert [evaluation.step for evaluation in held_out.results] == [0, 2, 4]
    assert held_out.group_ids[0].startswith("eval-0/")
    assert len(set(held_out.group_ids)) == len(held_out.group_ids) == 18


@pytest.mark.parametrize(
    ("step", "evaluated", "made"),
    [(0, None, [0, 2, 4]), (3, None, [3, 4]), (3, 0, [3, 4]), (3, 2, [4]), (3, 3, [4]), (4, 2, [4]), (4, 4, [])],
)
async def test_a_resumed_run_makes_up_for_the_newest_that_earlier_starts_lack(
    step: int, evaluated: int | None, made: list[int]
) -> None:
    held_out = HeldOut()
    async with held_out.evaluating() as evaluator:
        held_out.install(step)
        evaluator.begin(step, version=step, evaluated=evaluated)
        await settle()
        for later in range(step + 1, 6):
            held_out.install(later)
            evaluator.step_ended(later, version=later)
            await settle()
    assert [evaluation.step for evaluation in held_out.results] == made


async def test_none_falls_due_where_none_is_asked_for() -> None:
    held_out = HeldOut(every_steps=None)
    async with held_out.evaluating() as evaluator:
        evaluator.step_ended(0, version=0)
        await settle()
    assert held_out.results == []


async def test_it_borrows_its_share_of_the_slots_and_gives_it_back() -> None:
    held_out = HeldOut(max_running=8, share=0.25)
    async with held_out.evaluating() as evaluator:
        evaluator.step_ended(2, version=0)
        await settle()
    assert held_out.most_running == 2
    assert held_out.lent == [2, 0]


@pytest.mark.parametrize(("max_running", "share", "slots"), [(64, 0.125, 8), (4, 0.9, 3), (4, 0.01, 1), (1, 0.5, 1)])
def test_training_and_evaluation_both_keep_a_slot(max_running: int, share: float, slots: int) -> None:
    assert EvaluationSettings(share=share).slots(max_running) == slots


async def test_what_falls_due_meanwhile_is_made_once_and_of_the_newest_weights() -> None:
    held_out = HeldOut()
    held_out.going.clear()
    async with held_out.evaluating() as evaluator:
        for step in (0, 2, 4, 6):
            held_out.install(step)
            evaluator.step_ended(step, version=step)
            await settle()
        held_out.going.set()
        await settle()
    assert [evaluation.step for evaluation in held_out.results] == [0, 6]
    assert held_out.results[-1].coalesced == 2


async def test_it_waits_for_its_weights_and_says_which_versions_made_it() -> None:
    held_out = HeldOut(tasks=4, max_running=4, share=0.25)
    async with held_out.evaluating() as evaluator:
        evaluator.step_ended(2, version=2)
        await settle()
        assert held_out.group_ids == []  # version 2 is not installed yet
        held_out.going.clear()
        held_out.install(2)
        await settle()
        held_out.install(3)  # weights move on under it
        held_out.going.set()
        await settle()
    (evaluation,) = held_out.results
    versions = [result.policy_versions for result in evaluation.results.values()]
    assert versions[0] is not None
    assert min(low for low, _ in filter(None, versions)) >= 2
    assert max(high for _, high in filter(None, versions)) == 3


async def test_after_training_it_is_finished_in_all_the_slots() -> None:
    held_out = HeldOut(tasks=8, max_running=8, share=0.25)
    held_out.going.clear()
    async with held_out.evaluating() as evaluator:
        evaluator.step_ended(2, version=0)
        await settle()
        finishing = asyncio.create_task(evaluator.finish())
        await settle()
        assert held_out.running == 8
        held_out.going.set()
        await finishing
        assert evaluator.is_idle
    assert [evaluation.step for evaluation in held_out.results] == [2]


async def test_training_may_end_in_any_turn_of_an_evaluation() -> None:
    for turns in range(60):
        held_out = HeldOut(tasks=2)
        async with held_out.evaluating() as evaluator:
            evaluator.step_ended(2, version=0)
            for _ in range(turns):
                await asyncio.sleep(0)
            await evaluator.finish()
        assert [evaluation.step for evaluation in held_out.results] == [2]


async def test_after_training_it_has_a_deadline() -> None:
    held_out = HeldOut(finish_s=0.01)
    held_out.going.clear()
    async with held_out.evaluating() as evaluator:
        evaluator.step_ended(2, version=0)
        await evaluator.finish()
        assert not evaluator.is_idle
        assert evaluator.describe() == "step 2"
    assert held_out.running == 0
    assert held_out.results == []


@pytest.mark.parametrize("is_running", [True, False], ids=["that runs", "that is due"])
def test_after_training_it_waits_for_no_outage(is_running: bool) -> None:
    def failing(task: Task, attempt: int, now_s: float) -> Exception | None:
        return FAILURES["environment_failed"]("away") if task.environment == "a" else None

    async def run() -> tuple[Evaluation, ...]:
        held_out = Flaky(failing, max_running=64, finish_s=60.0)
        async with held_out.evaluating() as evaluator:
            evaluator.step_ended(2, version=0)
            if is_running:
                await asyncio.sleep(20)
            await evaluator.finish()
            assert evaluator.is_idle
        return tuple(held_out.results)

    (evaluation,) = run_in_virtual_time(run())
    assert evaluation.duration_s < 60
    assert (len(evaluation.results["b"].rewards), evaluation.results["b"].failed) == (32, {})
    assert (evaluation.results["a"].rewards, evaluation.results["a"].failed) == ([], {"environment_failed": 32})


async def test_one_whose_weights_never_come_is_left_out() -> None:
    held_out = HeldOut()
    async with held_out.evaluating() as evaluator:
        evaluator.step_ended(2, version=1)
        await settle()
        assert evaluator.describe() == "step 2"
        held_out.end()
        await evaluator.finish()
        assert evaluator.is_idle
    assert held_out.results == []


async def test_an_engines_failure_is_not_a_result() -> None:
    held_out = HeldOut()
    held_out.fate = {"a/train/0": EngineFailed("gone")}
    held_out.evaluator.step_ended(0, version=0)
    with pytest.raises(ExceptionGroup) as caught:
        await held_out.evaluator.run(held_out.wait_installed)
    assert caught.group_contains(EngineFailed)
    assert held_out.lent == [2, 0]
