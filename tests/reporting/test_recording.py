from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailrace.batching import Packing, SampledGroup, form_batch, sample_group
from tailrace.batching.slices import drained
from tailrace.records import (
    BatchSummary,
    GenerationRequest,
    Group,
    Outcome,
    RequestId,
    Rollout,
    RolloutId,
    SamplingParams,
    SessionId,
    StepSkipped,
    StepTrained,
)
from tailrace.replay.capture import CaptureWriter
from tailrace.reporting.advice import HISTORY, advice
from tailrace.reporting.observer import EarlierStarts, RunObserver
from tailrace.reporting.recording import RunRecorder
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.reporting.tokens import TokenWriter
from tailrace.reporting.totals import RunTotals
from tailrace.reporting.trackers.hub import Trackers
from tailrace.run.callbacks import Callbacks
from tailrace.scheduling import Ledger
from tailrace.tracing.background import BackgroundWriter
from tests.reporting.example_run import a_rollout


def a_group(*rewards: float) -> Group:
    rollouts = [a_rollout(1, place, reward, []).rollout for place, reward in enumerate(rewards)]
    return Group(rollouts[0].group_id, rollouts[0].task, rollouts)


def a_summary(rollouts: list[Rollout], *, masked_tokens: int = 0) -> BatchSummary:
    sampled = sum(rollout.num_completion_tokens for rollout in rollouts)
    return BatchSummary(
        step=1,
        trainer_version=1,
        num_samples=len(rollouts),
        num_rollouts=len(rollouts),
        num_tokens=sum(rollout.num_tokens for rollout in rollouts),
        loss_tokens=sampled - masked_tokens,
        masked_tokens=masked_tokens,
        num_rows=1,
        row_tokens=512,
        staleness_mean=0.5,
        staleness_max=2,
        padding=0.25,
    )


def test_rewards_are_those_of_the_batch_and_of_what_was_filtered_in_the_step_that_they_ended_in() -> None:
    recorder = RunRecorder()
    trained, even = a_group(0.0, 1.0), a_group(1.0, 1.0)
    recorder.group_scored(trained)
    recorder.group_scored(even)
    end(recorder, even, Outcome.filtered("zero_spread"))
    assert recorder.flush()["reward/mean"] == 1.0  # the other one waits for its batch

    end(recorder, trained, Outcome.trained(2))
    end(recorder, even, Outcome.filtered("zero_spread"))
    end(recorder, even, Outcome.cancelled("run_ended"))
    metrics = recorder.flush()
    assert metrics["reward/mean"] == metrics["reward/alphabet-sort/mean"] == 0.75
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["batch/reward_mean"] == 0.5
    assert metrics["reward_component/ratio"] == 0.75


def test_groups_without_spread_are_counted_as_they_are_scored() -> None:
    recorder = RunRecorder()
    recorder.group_scored(a_group(0.0, 1.0))
    recorder.group_scored(a_group(1.0, 1.0))
    metrics = recorder.flush()
    assert metrics["group/zero_spread_share"] == metrics["reward/alphabet-sort/zero_spread_share"] == 0.5


def end(recorder: RunRecorder, group: Group, outcome: Outcome) -> None:
    for rollout in group.rollouts:
        recorder.rollout_ended(rollout.rollout_id, rollout, outcome)


def test_every_outcome_is_counted_with_its_reason() -> None:
    recorder = RunRecorder()
    trained, filtered = a_group(0.0, 1.0).rollouts
    recorder.rollout_ended(trained.rollout_id, trained, Outcome.trained(1))
    recorder.rollout_ended(filtered.rollout_id, filtered, Outcome.filtered("zero_spread"))
    recorder.rollout_ended(RolloutId("lost"), None, Outcome.failed("timeout"))
    recorder.rollout_ended(RolloutId("lost"), None, Outcome.failed("timeout"))
    metrics = recorder.flush()
    assert metrics["rollout/failed/timeout"] == 2
    assert metrics["rollout/trained"] == 1
    assert metrics["rollout/filtered/zero_spread"] == 1
    assert metrics["rollout/failed_share"] == 0.5
    assert metrics["bias/wasted_tokens"] == filtered.num_completion_tokens


def test_what_is_kept_unscored_counts_as_failed_and_names_its_environment() -> None:
    recorder = RunRecorder()
    end(recorder, a_group(0.0, 1.0), Outcome.trained(1))
    judged = a_group(0.0, 0.0)
    for rollout in judged.rollouts:
        rollout.reward = None
    end(recorder, judged, Outcome.filtered("unscored"))
    metrics = recorder.flush()
    assert metrics["rollout/failed_share"] == 0.5
    assert metrics["environment/alphabet-sort/failed/unscored"] == 2
    (found,) = advice([metrics] * HISTORY)
    assert found.seen == "50 % of rollouts ended without a reward, most of them alphabet-sort: unscored"


def test_tokens_that_are_not_trained_on_are_counted_by_reason_and_environment() -> None:
    recorder = RunRecorder()
    trained, filtered, failed = a_group(0.0, 1.0, 0.5).rollouts
    for rollout, outcome in (
        (trained, Outcome.trained(1)),
        (filtered, Outcome.filtered("stale")),
        (failed, Outcome.failed("timeout")),
    ):
        recorder.tokens_dropped(rollout, rollout.num_completion_tokens, outcome)
    dropped = {name: value for name, value in recorder.flush().items() if "dropped_tokens" in name}
    assert dropped == {
        f"{whose}/dropped_tokens/{reason}": rollout.num_completion_tokens
        for whose in ("rollout", f"environment/{trained.task.environment}")
        for reason, rollout in (("stale", filtered), ("timeout", failed))
    }


def an_observer(
    folder: Path, writer: BackgroundWriter, release: Callable[[RolloutId], None] = lambda _: None
) -> RunObserver:
    return RunObserver(
        metrics=JsonlSink(folder / "metrics.jsonl", writer),
        rollouts=RolloutWriter(folder / "rollouts", writer),
        tokens=TokenWriter(folder / "tokens", writer, str, every_steps=0, max_bytes=0),
        capture=CaptureWriter(folder / "capture", writer, steps=0, max_bytes=0, settings_json="{}"),
        listener=Callbacks(),
        trackers=Trackers(),
        submit=writer.submit,
        release_payloads=release,
    )


def a_request(rollout: Rollout) -> GenerationRequest:
    names = RequestId(f"request of {rollout.rollout_id}"), SessionId("session"), rollout.group_id
    return GenerationRequest(*names, np.array([1, 2], np.int32), SamplingParams(), owner=rollout.rollout_id)


async def test_tokens_of_a_completion_that_was_cut_are_dropped_for_its_rollouts_reason(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    observer = an_observer(tmp_path, writer)
    for place, outcome in enumerate((Outcome.failed("timeout"), Outcome.cancelled("straggler"))):
        lost = replace(a_rollout(1, place, 0.0, []).rollout, branches=[], reward=None)  # in its first turn
        observer.request_cancelled(a_request(lost), 8_000 + place)
        observer.rollout_lost(lost)
        observer.rollout_ended(lost.rollout_id, None, outcome, "it took too long")
    observer.write_rest(0)
    assert writer.close()
    for whose in ("rollout", "environment/alphabet-sort"):
        assert observer.totals.sum(f"{whose}/dropped_tokens/timeout") == 8_000
        assert observer.totals.sum(f"{whose}/dropped_tokens/straggler") == 8_001
    assert observer.totals.sum("bias/wasted_tokens") == 16_001


async def test_nothing_that_is_cut_of_an_evaluation_is_kept(tmp_path: Path) -> None:
    writer, released = BackgroundWriter(), list[RolloutId]()
    observer = an_observer(tmp_path, writer, released.append)
    held_out = replace(a_rollout(1, 0, 0.0, []).rollout, branches=[], reward=None)
    observer.request_cancelled(a_request(held_out), 8_000)
    observer.held_out_ended(held_out.rollout_id)
    observer.rollout_lost(held_out)  # one of training that has the same name
    observer.rollout_ended(held_out.rollout_id, None, Outcome.failed("timeout"), "it took too long")
    observer.write_rest(0)
    assert writer.close()
    assert observer.totals.sum("bias/wasted_tokens") == 0
    assert released == [held_out.rollout_id] * 2


async def test_the_first_step_that_is_skipped_for_a_reason_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter()
    observer = an_observer(tmp_path, writer)
    for step, reason in enumerate(("", "non_finite", "non_finite", "nothing_trainable"), 1):
        sampled = sample_group(replace(a_group(0.1, 0.2), advantages=[-1.0, 1.0]), oldest_version=0)
        formed = drained(form_batch([sampled], step=step, trainer_version=1, packing=Packing(512)))
        trained = StepTrained(epoch="e", step=step, version=1, metrics={})
        skipped = StepSkipped(epoch="e", step=step, version=1, reason=reason)
        observer.step_ended(skipped if reason else trained, formed)
    assert writer.close()
    assert observer.totals.skipped_steps == 3
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.endswith("; the trainer's log says why") for message in warned] == [True, False]
    assert [message.partition(":")[0] for message in warned] == [
        "step 2 was skipped, and more of 'non_finite' are only counted",
        "step 4 was skipped, and more of 'nothing_trainable' are only counted",
    ]


async def test_rollouts_of_earlier_starts_are_counted_under_plain_names(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    observer = an_observer(tmp_path, writer)
    earlier = RunTotals([{"step": 1, "scheduler/admitted": 12, "rollout/trained": 4, "policy/version": 1}])
    observer.begin(EarlierStarts(totals=earlier))
    assert writer.close()
    tally = observer.tally(Ledger())
    assert tally.balances
    assert tally.by_state == {"trained": 4, "cancelled": 8, "failed": 0, "filtered": 0}
    assert {type(state) for counts in (tally.by_state, tally.by_reason) for state in counts} == {str}


def test_a_stopped_rollout_wastes_its_finished_turns_and_what_it_had_of_the_next_one() -> None:
    recorder = RunRecorder()
    stopped, at_the_end = a_group(0.0, 1.0).rollouts
    for rollout in (stopped, at_the_end):
        recorder.bias.cut(rollout.rollout_id, 5)
        assert recorder.bias.losing(rollout) == rollout.num_completion_tokens + 5
    recorder.rollout_ended(stopped.rollout_id, None, Outcome.cancelled("straggler"))
    assert recorder.flush()["bias/wasted_tokens"] == stopped.num_completion_tokens + 5
    assert recorder.flush()["bias/wasted_tokens"] == 0


def trained(recorder: RunRecorder, rollouts: list[Rollout], *, masked_of_each: int = 0) -> None:
    """A batch of these rollouts was trained, without the loss of so many tokens of each."""
    for rollout in rollouts:
        recorder.rollout_ended(rollout.rollout_id, rollout, Outcome.trained(1))
    group = SampledGroup(
        Group(rollouts[0].group_id, rollouts[0].task, rollouts),
        trained=rollouts,
        loss_tokens=[rollout.num_completion_tokens - masked_of_each for rollout in rollouts],
        masked_tokens=masked_of_each * len(rollouts),
    )
    recorder.step_ended(a_summary(rollouts, masked_tokens=masked_of_each * len(rollouts)), [group])


def test_losing_the_long_rollouts_shows_in_the_length_ratio() -> None:
    recorder = RunRecorder(warmup_steps=0)
    rollouts = a_group(*[0.5] * 8).rollouts
    for rollout in rollouts:
        recorder.rollout_finished(rollout)
    for rollout in rollouts[4:]:
        recorder.rollout_ended(rollout.rollout_id, rollout, Outcome.filtered("stale"))
    trained(recorder, rollouts[:4], masked_of_each=6)
    metrics = recorder.flush()
    ratios = RunTotals([metrics]).ratios()
    assert ratios["bias/length_ratio"] == (30 + 31 + 32 + 33) / 4 / 33.5
    assert ratios["bias/loss_length_ratio"] == pytest.approx(102 / 4 / 33.5)
    assert ratios["bias/masked_share"] == 24 / (126 + 80)
    assert metrics[f"environment/{rollouts[0].task.environment}/masked_tokens"] == 24
    assert metrics["rollout/completion_tokens"] == 33.5


def test_the_length_ratio_of_loss_is_of_the_rollouts_that_the_length_ratio_is_of() -> None:
    recorder = RunRecorder(warmup_steps=1)
    early, late = (a_group(*[0.5] * 4).rollouts for _ in range(2))
    late = [replace(rollout, rollout_id=RolloutId(f"{rollout.rollout_id}/late")) for rollout in late]
    for rollout in early:
        recorder.rollout_finished(rollout)
    recorder.step_ended(a_summary([]), [])
    for rollout in late:
        recorder.rollout_finished(rollout)
    trained(recorder, early, masked_of_each=20)  # in a batch after the first, but finished before
    trained(recorder, late, masked_of_each=3)
    ratios = RunTotals([recorder.flush()]).ratios()
    assert ratios["bias/length_ratio"] == 1
    assert ratios["bias/loss_length_ratio"] == pytest.approx((31.5 - 3) / 31.5)


def test_where_everything_is_trained_the_length_ratio_is_1_whenever_it_was_sampled() -> None:
    recorder = RunRecorder(warmup_steps=1)
    rollouts = a_group(*[0.5] * 8).rollouts
    for rollout in rollouts[:5]:
        recorder.rollout_finished(rollout)
    trained(recorder, rollouts[:4])
    for rollout in rollouts[5:]:
        recorder.rollout_finished(rollout)
    trained(recorder, rollouts[4:])
    ratios = RunTotals([recorder.flush()]).ratios()
    assert ratios["bias/length_ratio"] == ratios["bias/loss_length_ratio"] == 1


def test_warm_up_does_not_count_in_the_ratios() -> None:
    recorder = RunRecorder(warmup_steps=1)
    rollouts = a_group(0.5).rollouts
    recorder.rollout_finished(rollouts[0])
    trained(recorder, rollouts)
    assert "bias/length_ratio" not in RunTotals([recorder.flush()]).ratios()


def test_a_batch_is_recorded_with_its_staleness_weighted_by_tokens() -> None:
    recorder = RunRecorder()
    recorder.step_ended(a_summary(a_group(0.1, 0.2).rollouts), [])
    metrics = recorder.flush()
    assert metrics["batch/padding"] == 0.25
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0.5, 2)
    assert metrics["batch/samples"] == metrics["batch/rollouts"] == 2
