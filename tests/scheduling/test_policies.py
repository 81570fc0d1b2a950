"""What becomes of old tokens and of stragglers, over modelled engines in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailrace.errors import SettingsError
from tailrace.generation.holding import HoldingGenerate
from tailrace.generation.recorded_generate import RecordedGenerate
from tailrace.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupId,
    OnChunk,
    SamplingParams,
    TerminalState,
)
from tailrace.scheduling.outstanding import OpenGroup, Outstanding
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.stragglers import Stragglers
from tailrace.scheduling.tasks import TaskKey, TaskSource, TaskStream
from tailrace.simulation import SimulatedRun, simulate
from tailrace.simulation.run import Simulation
from tailrace.simulation.virtual_time import run_in_virtual_time
from tests.scheduling.world import World, environment, make_world
from tests.simulation.plans import small_plan


def simulated(**scheduling: object) -> SimulatedRun:
    run = simulate(small_plan(steps=20, scheduling=scheduling))
    assert run.staleness_max <= run.plan.max_staleness
    return run


def outcomes(run: SimulatedRun) -> dict[str, int]:
    return {str(name): count for name, count in run.outcomes.items()}


def test_masking_throws_nothing_away_while_every_token_is_new_enough() -> None:
    assert outcomes(simulated()) == {"trained": 320}


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_waiting_masks_nothing_and_wastes_nothing(max_staleness: int) -> None:
    run = simulated(on_stale="wait", max_staleness=max_staleness)
    assert outcomes(run) == {"trained": 320}
    assert run.masked_share == 0


def test_restarting_and_dropping_stop_what_has_become_too_old_with_its_reason() -> None:
    restarted = outcomes(simulated(on_stale="restart", max_staleness=1))
    dropped = outcomes(simulated(on_stale="drop", max_staleness=1))
    assert restarted["cancelled(restarted)"] > 0
    assert dropped["cancelled(stale)"] > 0
    assert simulated(on_stale="drop", max_staleness=1).masked_share == 0


@pytest.mark.parametrize(
    "scheduling",
    [
        {"max_staleness": 1},
        {"max_staleness": 0, "over_sampling": 1.5},
        {"max_staleness": 1, "over_sampling": 2.0},
        {"max_staleness": 0, "over_sampling": 1.5, "group_release": "early"},
        {"max_staleness": 0, "over_sampling": 1.5, "on_stale": "restart"},
    ],
)
def test_what_is_ready_and_too_old_takes_no_place_in_a_batch(scheduling: dict[str, Any]) -> None:
    async def batch_sizes() -> set[int]:
        simulation = Simulation(small_plan(steps=20, scheduling=scheduling), watch=False)
        await simulation.run()
        assert simulation.observer.outcomes.keys() & {"filtered(stale)", "filtered(restarted)"}
        parts = 1 if "group_release" in scheduling else 4
        return {len(groups) * parts for groups in simulation.observer.batch_groups}

    assert run_in_virtual_time(batch_sizes()) == {16}


async def test_what_is_too_old_near_the_last_step_is_replaced() -> None:
    world = make_world(
        lambda number: float(number % 2), rows=64, max_steps=5, max_staleness=0, over_sampling=1.5, max_running=16
    )
    await world.run_steps(5)
    assert world.scheduler.ledger.reasons(TerminalState.FILTERED)["stale"] > 0
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] == [8] * 5


def slow_world(**settings: Any) -> World:
    """Rollouts that take many times as long as a step."""
    world = make_world(
        lambda number: float(number % 2), rows=32, max_running=24, pauses=lambda number: 3 + number * 7 % 23, **settings
    )
    world.runner.pause_s, world.train_s = 1.0, 1.0
    return world


def test_what_a_generator_that_lags_sampled_takes_no_place_in_a_batch_either() -> None:
    async def batch_sizes() -> list[int]:
        world = slow_world(max_staleness=0)
        world.lag_s = 20.0
        await world.run()
        assert world.scheduler.ledger.reasons(TerminalState.FILTERED)["stale"] > 0
        return [len(formed.groups) for formed in world.recorder.formed]

    assert {*run_in_virtual_time(batch_sizes())[:-1]} == {2}


def test_a_task_is_restarted_so_often_and_then_masked() -> None:
    never = simulated(on_stale="restart", max_restarts=0, max_staleness=1)
    assert outcomes(never) == outcomes(simulated(max_staleness=1))
    assert never.masked_share > 0

    async def restarts() -> set[int]:
        world = slow_world(max_staleness=1, on_stale="restart", max_restarts=2)
        await world.run()
        assert sum(formed.batch.summary.masked_tokens for formed in world.recorder.formed) > 0
        return {*world.recorder.restarts.values()}

    assert max(run_in_virtual_time(restarts())) == 2


@pytest.mark.parametrize(("max_restarts", "reason"), [(0, "stale"), (1000, "restarted")])
async def test_a_finished_group_that_is_wholly_too_old_is_restarted(max_restarts: int, reason: str) -> None:
    world = make_world(
        lambda number: float(number % 2),
        rows=64,
        max_staleness=0,
        over_sampling=1.5,
        max_running=16,
        on_stale="restart",
        max_restarts=max_restarts,
    )
    await world.run()
    assert [*world.scheduler.ledger.reasons(TerminalState.FILTERED)] == [reason]
    restarted = world.recorder.restarts
    assert bool(restarted) == bool(max_restarts)
    assert {world.recorder.trained_by_task[task] for task in restarted} <= {4}  # once it came up again


def test_what_is_left_of_a_group_that_was_split_is_not_started_again() -> None:
    """The other part may be trained on already."""

    async def most_trained() -> int:
        world = slow_world(max_staleness=1, on_stale="restart")
        world.runner.splits = True
        await world.run()
        assert world.recorder.restarts
        return max(world.recorder.trained_by_task.values())

    assert run_in_virtual_time(most_trained()) == 4


def test_over_sampling_drops_stragglers_and_favours_short_rollouts() -> None:
    run = simulated(over_sampling=2.0, on_straggler="drop", max_staleness=1)
    assert outcomes(run)["cancelled(straggler)"] > 0
    assert run.length_ratio < 0.9


def test_requeued_stragglers_start_from_scratch() -> None:
    run = simulated(over_sampling=1.5, on_straggler="requeue", max_staleness=1)
    assert outcomes(run)["cancelled(requeued)"] > 0


def test_requeued_stragglers_may_still_be_restarted_once_they_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, end = set[int](), TaskStream.end

    def note_and_end(stream: TaskStream, key: TaskKey, *, trained: bool) -> None:
        spent.add(stream.restarts(key))
        end(stream, key, trained=trained)

    monkeypatch.setattr(TaskStream, "end", note_and_end)
    run = simulated(over_sampling=1.5, on_straggler="requeue", on_stale="restart", max_staleness=4)
    assert "cancelled(restarted)" not in outcomes(run)
    assert spent == {0}


def test_resumed_stragglers_keep_their_rollouts_and_tokens() -> None:
    run = simulated(over_sampling=1.5, on_straggler="resume_next_step", max_staleness=12)
    assert outcomes(run) == {"trained": 320}
    assert run.wasted_share == 0
    assert run.staleness_mean > 0


def test_stragglers_that_go_on_are_trained_in_a_later_batch() -> None:
    assert outcomes(simulated(over_sampling=1.5, max_staleness=4)) == {"trained": 320}


async def test_the_budget_that_is_shown_has_room_for_what_over_sampling_starts_beyond_a_batch() -> None:
    shown = [
        make_world(lambda number: 0.0, max_staleness=1, over_sampling=factor).scheduler.statistics.budget_ceiling
        for factor in (1.0, 3.0)
    ]
    assert shown == [(1 + 1) * 8, (1 + 3) * 8]


async def test_groups_that_finish_beyond_the_batch_are_kept_for_the_next() -> None:
    world = make_world(lambda number: float(number % 2), rows=12, over_sampling=3.0, max_staleness=6, max_running=24)
    await world.run()
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 48
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] == [8] * 6


def test_nobody_resumes_without_generators_that_hold() -> None:
    async def make() -> None:
        with pytest.raises(SettingsError, match="set requests aside"):
            make_world(lambda number: 0.0, over_sampling=2.0, on_straggler="resume_next_step", holds=False)

    run_in_virtual_time(make())


async def test_groups_that_are_resumed_while_others_are_being_set_aside_are_held_no_more() -> None:
    class Holder:
        def __init__(self) -> None:
            self.held: set[str] = set()

        async def hold(self, group_ids: Collection[str]) -> None:
            self.held |= {*group_ids}

        def release(self, group_id: str) -> None:
            self.held.discard(group_id)

    running: list[Any] = [SimpleNamespace(is_running=True)]
    groups = [OpenGroup(GroupId(f"{number}"), TaskKey("any", 0, number), running, 0) for number in range(200)]
    outstanding, holder = Outstanding(TaskStream([TaskSource(environment())], seed=0)), Holder()
    for group in groups:
        outstanding.start(group)
    settings = SchedulingSettings(over_sampling=2.0, on_straggler="resume_next_step")
    stragglers = Stragglers(outstanding, holder, settings)
    passing = asyncio.create_task(stragglers.pass_edge())
    while not holder.held:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    assert len(holder.held) < 200
    stragglers.resume()
    await passing
    assert not holder.held
    assert not any(group.is_held for group in groups)
    assert outstanding.running == 200


def _sampled(count: int, reason: FinishReason) -> Completion:
    tokens = np.arange(count, dtype=np.int32)
    return Completion(tokens, np.zeros(count, np.float32), tokens, reason)


class Interruptible:
    """A token a second, and what was sampled handed back when asked."""

    def __init__(self) -> None:
        self.interrupted: dict[str, asyncio.Event] = {}
        self.prefixes: list[int] = []

    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        event = self.interrupted[request.request_id] = asyncio.Event()
        count, most = request.prefix_tokens, request.sampling.max_tokens
        self.prefixes.append(count)
        while count < most and not event.is_set():
            await asyncio.sleep(1)
            if on_chunk is not None:
                on_chunk(_sampled(1, FinishReason.RUNNING))
            count += 1
        return _sampled(count, FinishReason.LENGTH if count == most else FinishReason.ABORTED)

    async def interrupt(self, request_ids: object) -> int:
        for request_id in request_ids:  # type: ignore[attr-defined]
            self.interrupted[request_id].set()
        return 0


def test_what_a_cancelled_request_had_when_it_was_set_aside_is_told() -> None:
    async def main() -> None:
        engine, cancelled = Interruptible(), list[tuple[str, int]]()
        holding = HoldingGenerate(engine, engine.interrupt)
        recorded = RecordedGenerate(
            holding, lambda *_: None, lambda request, tokens: cancelled.append((request.request_id, tokens))
        )
        waiting = asyncio.create_task(
            recorded(
                GenerationRequest(
                    request_id="a",
                    session_id="a",
                    group_id="held",
                    prompt_token_ids=np.zeros(1, np.int32),
                    sampling=SamplingParams(max_tokens=10),
                )
            )
        )
        await asyncio.sleep(4.5)
        await holding.hold(["held"])
        await asyncio.sleep(100)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert cancelled == [("a", 5)]

    run_in_virtual_time(main())


def test_a_request_that_its_listener_ends_is_a_completion_of_what_was_heard() -> None:
    async def main() -> None:
        completed, cancelled, heard = list[Completion](), list[int](), list[int]()
        recorded = RecordedGenerate(Interruptible(), completed.append, lambda request, tokens: cancelled.append(tokens))

        def has_enough(chunk: Completion) -> None:
            heard.append(chunk.num_tokens)
            if len(heard) == 3:
                raise ZeroDivisionError

        asked = GenerationRequest(
            request_id="a",
            session_id="a",
            group_id="g",
            prompt_token_ids=np.zeros(1, np.int32),
            sampling=SamplingParams(max_tokens=10),
        )
        with pytest.raises(ZeroDivisionError):
            await recorded(asked, has_enough)
        assert ([one.num_tokens for one in completed], cancelled) == ([3], [])
        assert not completed[0].metrics.keys() & {"queue_s", "decode_s", "time_to_first_token_s"}  # means leave it out

    run_in_virtual_time(main())


def test_a_held_group_waits_with_its_tokens_and_new_requests_wait_as_well() -> None:
    async def main() -> None:
        engine = Interruptible()
        holding = HoldingGenerate(engine, engine.interrupt)
        clock = asyncio.get_running_loop().time

        async def ask(request_id: str, group_id: str) -> float:
            completion = await holding(
                GenerationRequest(
                    request_id=request_id,
                    session_id=request_id,
                    group_id=group_id,
                    prompt_token_ids=np.zeros(1, np.int32),
                    sampling=SamplingParams(max_tokens=10),
                )
            )
            assert completion.num_tokens == 10
            return clock()

        running = [asyncio.create_task(ask("a", "held")), asyncio.create_task(ask("b", "free"))]
        await asyncio.sleep(4.5)
        await holding.hold(["held"])
        running.append(asyncio.create_task(ask("c", "held")))
        await asyncio.sleep(100)
        assert [task.done() for task in running] == [False, True, False]
        holding.release("held")
        assert [await task for task in running] == [109.5, 10.0, 114.5]
        assert sorted(engine.prefixes) == [0, 0, 0, 5]

    run_in_virtual_time(main())
