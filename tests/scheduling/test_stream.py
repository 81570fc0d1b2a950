from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from tailrace.errors import TrainingError
from tailrace.records import NOTHING_TRAINABLE, Group, TerminalState
from tailrace.scheduling.admission import Verdict
from tests.scheduling.world import make_world


def spread(number: int) -> float:
    return float(number % 2)


async def test_every_task_of_an_epoch_is_trained_once() -> None:
    world = make_world(spread, rows=16)
    await world.run()
    ledger = world.scheduler.ledger
    assert ledger.total(TerminalState.TRAINED) == 64
    assert ledger.in_flight == 0
    indices = sorted(group.group.task.index for formed in world.recorder.formed for group in formed.groups)
    assert indices == list(range(16))


async def test_batches_hold_batch_size_rollouts_and_count_steps_from_one() -> None:
    world = make_world(spread, rows=16)
    await world.run()
    assert [formed.batch.summary.step for formed in world.recorder.formed] == list(range(1, 9))
    assert {formed.batch.summary.num_rollouts for formed in world.recorder.formed} == {8}


async def test_the_last_batch_is_smaller_when_nothing_can_fill_it() -> None:
    world = make_world(spread, rows=5)
    await world.run()
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] == [8, 8, 4]


async def test_no_more_is_generated_than_the_last_step_takes() -> None:
    world = make_world(spread, rows=64, max_staleness=4, max_running=64, max_steps=3)
    await world.run_steps(3)
    assert world.scheduler.ledger.admitted == world.scheduler.ledger.total(TerminalState.TRAINED) == 24


async def test_a_full_buffer_holds_idle_engines_while_the_trainer_is_fed() -> None:
    world = make_world(spread, rows=64, max_staleness=9, max_running=16)
    running = asyncio.create_task(world.scheduler.run())
    for _ in range(200):  # no trainer takes anything
        await asyncio.sleep(0)
    statistics = world.scheduler.statistics
    assert (statistics.running, statistics.batches_ahead) == (0, 2)
    assert statistics.verdict is Verdict.BUFFER_FULL
    running.cancel()


@pytest.mark.parametrize("buffer_batches", [0.0, 0.5, 1.0])
async def test_a_small_buffer_starves_no_idle_trainer(buffer_batches: float) -> None:
    # the first rollout outlives all the others: they fill batches meanwhile
    world = make_world(
        spread,
        rows=16,
        max_staleness=9,
        buffer_batches=buffer_batches,
        pauses=lambda number: 1000 if number == 0 else 2,
    )
    await world.run()
    assert len(world.recorder.formed) == 8
    assert any(group.group.group_id.endswith("#1") for group in world.recorder.formed[-1].groups)


async def test_what_is_filtered_near_the_last_step_is_replaced() -> None:
    # every other group has the same reward everywhere, and is filtered
    world = make_world(lambda number: float(number % 2 and number // 4 % 2), rows=64, max_staleness=4, max_steps=3)
    await world.run_steps(3)
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] == [8, 8, 8]
    assert world.scheduler.ledger.admitted <= 48 + 8


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
async def test_trained_tokens_are_never_older_than_the_bound(max_staleness: int) -> None:
    # one rollout in nine takes long enough to outlive several steps
    world = make_world(spread, rows=64, max_staleness=max_staleness, pauses=lambda number: 60 if number % 9 == 0 else 2)
    await world.run()
    for formed in world.recorder.formed:
        batch = formed.batch.assembled()
        age = batch.summary.trainer_version - batch.policy_versions[batch.loss_mask]
        assert np.all(age <= max_staleness)
    trained, filtered = (world.scheduler.ledger.total(s) for s in (TerminalState.TRAINED, TerminalState.FILTERED))
    assert trained + filtered == 256


@pytest.mark.parametrize("group_release", ["together", "early"])
async def test_advantages_are_whitened_over_each_batch(group_release: str) -> None:
    settings = {"whiten_advantages": True, "group_release": group_release, "advantage": "rloo"}
    world = make_world(spread, rows=32, **settings)
    await world.run()
    for formed in world.recorder.formed:
        batch = formed.batch.assembled()
        advantages = np.concatenate([batch.row(index).advantages for index in range(batch.num_rows)])[batch.loss_mask]
        assert advantages.mean() == pytest.approx(0, abs=1e-6)
        assert advantages.std() == pytest.approx(1, abs=1e-4)


async def test_running_rollouts_stay_within_the_engines_and_the_budget() -> None:
    world = make_world(spread, rows=32, max_running=12, max_staleness=4)
    await world.run()
    assert world.runner.most_live <= 12 + 3  # a group may overdraw by its size less one


async def test_slots_that_are_lent_are_left_free_until_they_come_back() -> None:
    world = make_world(spread, rows=64, max_running=12, max_staleness=9, pauses=lambda number: 1000)
    running = asyncio.create_task(world.scheduler.run())
    world.scheduler.lend(8)
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.scheduler.statistics.running == 4
    world.scheduler.lend(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.scheduler.statistics.running == 12
    running.cancel()


async def test_a_group_of_equal_rewards_is_filtered_and_its_budget_refunded() -> None:
    world = make_world(lambda number: 1.0 if number < 8 else spread(number), rows=8, max_staleness=0, max_running=4)
    await world.run()
    assert world.recorder.filtered["zero_spread"] == 2
    assert world.scheduler.ledger.reasons(TerminalState.FILTERED) == {"zero_spread": 8}
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 24


@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_no_group_is_filtered_for_equal_rewards_where_these_are_the_advantages(reward: float) -> None:
    """Of groups of zeros alone that would be a bias: where advantages are whitened, 0 is no advantage of 0."""
    world = make_world(lambda number: reward if number < 8 else spread(number), rows=8, advantage="reward")
    await world.run()
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 32


async def test_a_failed_rollout_is_tried_again_and_costs_only_itself() -> None:
    world = make_world(lambda number: "environment_failed" if number == 1 else spread(number), rows=4)
    await world.run()
    assert world.scheduler.ledger.reasons(TerminalState.FAILED) == {"environment_failed": 1}
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 16


async def test_a_group_that_lost_members_goes_on_smaller() -> None:
    world = make_world(lambda number: "timeout" if number == 0 else spread(number), rows=4, max_retries=0)
    await world.run()
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 15
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] in ([7, 8], [8, 7])


async def test_a_group_that_sampled_no_token_takes_no_place_in_a_batch() -> None:
    world = make_world(spread, rows=16)
    world.runner.is_silent = lambda number: 20 <= number < 24  # the sixth group
    await world.run()
    assert world.scheduler.ledger.reasons(TerminalState.FILTERED) == {"nothing_sampled": 4}
    assert [formed.batch.summary.num_rollouts for formed in world.recorder.formed] == [8] * 7 + [4]


async def test_nothing_trainable_for_ten_batches_ends_the_run_with_the_reason() -> None:
    world = make_world(lambda number: 0.0, rows=8, epochs=None)
    with pytest.raises(ExceptionGroup) as caught:
        await world.run()
    assert caught.group_contains(TrainingError, match="zero_spread", depth=None)


async def test_a_skipped_step_filters_its_rollouts_with_the_trainers_reason() -> None:
    world = make_world(spread, rows=8)
    world.skip = lambda step: step == 2
    await world.run()
    assert world.scheduler.ledger.reasons(TerminalState.FILTERED) == {"not_finite": 8}
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 24


async def test_batches_of_which_the_loss_keeps_nothing_end_the_run_with_the_reason() -> None:
    world = make_world(spread, rows=8, epochs=None, max_barren_batches=3)
    world.skip, world.skip_reason = lambda step: step > 2, NOTHING_TRAINABLE
    with pytest.raises(ExceptionGroup) as caught:
        await world.run()
    assert caught.group_contains(TrainingError, match="filtered: 24 nothing_trainable", depth=None)


async def test_a_batch_that_teaches_something_now_and_then_lets_the_run_go_on() -> None:
    world = make_world(spread, rows=40, max_barren_batches=3)
    world.skip, world.skip_reason = lambda step: step % 3 > 0, NOTHING_TRAINABLE
    await world.run()
    assert len(world.recorder.formed) == 20


async def test_cancelling_the_run_cancels_what_is_in_flight_and_balances() -> None:
    world = make_world(spread, rows=64, pauses=lambda number: 1000)
    running = asyncio.create_task(world.scheduler.run())
    for _ in range(5):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.runner.live == 0
    world.scheduler.finish("run_ended")
    ledger = world.scheduler.ledger
    assert ledger.admitted == ledger.total(TerminalState.CANCELLED) > 0


async def test_the_end_cancels_one_group_in_a_turn_of_the_loop() -> None:
    world = make_world(spread, rows=64, max_staleness=32, max_running=256, pauses=lambda _: 1_000_000)
    running = asyncio.create_task(world.scheduler.run())
    while world.runner.live < 256:  # noqa: ASYNC110 - a count has no event
        await asyncio.sleep(0)
    running.cancel()
    live = []
    while not running.done():
        live.append(world.runner.live)
        await asyncio.sleep(0)
    assert live[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(live)) <= 8
    world.scheduler.finish("run_ended")


async def test_resuming_starts_over_exactly_what_was_not_trained() -> None:
    world = make_world(spread, rows=16, epochs=1)
    first = world.recorder.formed
    trainer = asyncio.create_task(world.train())
    running = asyncio.create_task(world.scheduler.run())
    while len(first) < 3:  # noqa: ASYNC110  (nothing tells a test of a batch)
        await asyncio.sleep(0)
    running.cancel()
    trainer.cancel()
    await asyncio.gather(running, trainer, return_exceptions=True)
    kept = [formed for formed in first if formed.batch.summary.step <= 3]

    resumed = make_world(spread, rows=16, epochs=1, step=3, state=world.states[3])
    await resumed.run()
    groups = [group.group for formed in [*kept, *resumed.recorder.formed] for group in formed.groups]
    assert sorted(group.task.index for group in groups) == list(range(16))
    assert [formed.batch.summary.step for formed in resumed.recorder.formed] == [4, 5, 6, 7, 8]


async def test_names_of_groups_and_rollouts_are_unique_over_every_resume_of_a_run() -> None:
    trained: list[Group] = []
    step, state = 0, b""
    for resumes, steps in enumerate((2, 3, 3)):  # each run goes on from the step before its predecessor's last
        world = make_world(spread, rows=5, epochs=None, max_staleness=4, step=step, state=state, resumes=resumes)
        await world.run_steps(step + steps)
        kept = world.recorder.formed[: steps - 1]
        trained += [group.group for formed in kept for group in formed.groups]
        step += steps - 1
        state = world.states[step]
    groups, rollouts = {group.group_id for group in trained}, [one.rollout_id for g in trained for one in g.rollouts]
    assert len(groups) == len(trained) == 10
    assert len(set(rollouts)) == len(rollouts)


async def test_while_what_carries_batches_is_away_nothing_starts_and_no_batch_closes_early() -> None:
    world = make_world(spread, rows=16)
    world.scheduler.hold(True)
    running = asyncio.create_task(world.run())
    for _ in range(200):
        await asyncio.sleep(0)
    assert world.scheduler.ledger.admitted == 0
    assert world.scheduler.statistics.verdict is Verdict.TRANSPORT_AWAY
    world.scheduler.hold(False)
    await running
    assert {formed.batch.summary.num_rollouts for formed in world.recorder.formed} == {8}
    assert world.scheduler.ledger.total(TerminalState.TRAINED) == 64
