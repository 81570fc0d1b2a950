"""Scoring inside a run: a judge on the policy's own engine, error budgets, and what is kept unscored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models.loading import resolve_model
from tailrace.records import Message, RunStatus
from tailrace.rollouts.chat.tokenizer import ChatTokenizer
from tests.run.runs import environment, records, rollouts, run_inline
from tests.support.judge_endpoint import Answer, endpoint, verdict
from tests.support.teacher_endpoint import PATHS, teacher

JUDGED = (
    *("--environment.name", "examples.own_judge:names_by_key", "--max_steps", "2"),
    *("--rollouts.group_size", "4", "--rollouts.max_tokens", "24", "--scheduling.batch_size", "8"),
)


async def test_an_example_trains_with_a_judge_served_by_the_policys_own_engine(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, *JUDGED)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 2)
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert sum(line.get("judge/calls", 0) for line in lines) >= 4
    assert sum(line.get("judge/completion_tokens", 0) for line in lines) > 0
    trained = [one for one in rollouts(tmp_path / "run") if one["outcome"]["state"] == "trained"]
    assert len(trained) == 16
    for one in trained:
        assert one["reward"] == one["reward_components"]["judge"]
        assert one["reward_components"]["own"] in (0.0, 1.0)


async def test_the_example_trains_with_a_judge_behind_an_endpoint_that_ranks_by_the_environments_rubric(
    tmp_path: Path,
) -> None:
    def rank(request: dict[str, list[Message]]) -> Answer:
        system, user = request["messages"]
        assert "alphabetical order" in system["content"]
        count = user["content"].count("<attempt id=")
        return verdict({str(number): number / 10 for number in range(count, 0, -1)})

    async with endpoint(rank) as serving:
        ranked = ("--environment.name", "examples.own_judge:names_by_rank", "--environment.judge.url", serving.url)
        summary = await run_inline(tmp_path, *ranked, "--max_steps", "1")
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 1)
    trained = [one for one in rollouts(tmp_path / "run") if one["outcome"]["state"] == "trained"]
    assert {one["reward"] for one in trained} <= {0.1, 0.2}


async def test_a_judge_that_is_down_costs_groups_and_never_becomes_a_reward(tmp_path: Path) -> None:
    async with endpoint(Answer(status=503)) as serving:
        judged = ("--environment.judge.url", serving.url, "--environment.judge.retries", "0")
        summary = await run_inline(tmp_path, *judged, "--max_steps", "1", "--scheduling.max_failing_s", "0")
    assert summary.status is RunStatus.FAILED
    assert "judge_failed" in summary.reason
    ended = rollouts(tmp_path / "run")
    assert {one["outcome"]["reason"] for one in ended if one["outcome"]["state"] == "failed"} == {"judge_failed"}
    assert all(one["reward_components"].keys() == set() for one in ended)


@pytest.mark.parametrize("top_k", [0, 4])
async def test_a_policy_learns_from_a_teacher_what_no_reward_says(tmp_path: Path, top_k: int) -> None:
    """The teacher finds odd tokens likely; rewards are all equal."""
    tokenizer = ChatTokenizer(resolve_model("bundled:quickstart").location)
    async with endpoint(teacher(tokenizer.encode, top_k=top_k), paths=PATHS) as serving:
        taught = ("--trainer.loss.distillation.url", serving.url, "--trainer.loss.distillation.model", "big")
        taught += ("--trainer.loss.distillation.top_k", str(top_k)) if top_k else ()
        kept = ("--scheduling.filter_zero_spread", "true", "--trainer.learning_rate", "3e-3", "--schedule", "sync")
        summary = await run_inline(
            tmp_path, *environment("praising"), *taught, *kept, "--max_epochs", "24", "--max_steps", "6"
        )
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 6)
    assert summary.ledger.by_state["trained"] == 6 * 4
    lines = records(tmp_path / "run" / "metrics.jsonl")
    found = [line["training/praising/distillation"] for line in lines]
    assert found[-1] < 0.8 * found[0]
    assert all(line["training/reward_loss"] == 0 for line in lines)
    assert sum(line["teacher/calls"] for line in lines) >= 6 * 4


async def test_a_teacher_that_is_down_costs_groups_and_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(resolve_model("bundled:quickstart").location)
    fits = teacher(tokenizer.encode)
    answers = [fits, fits, Answer(status=503)]  # it says which tokens a text has, and scores them
    taught = ("--trainer.loss.distillation.retries", "0", "--trainer.loss.distillation.model", "big")
    ended = ("--max_steps", "1", "--scheduling.max_failing_s", "0")
    async with endpoint(*answers, paths=PATHS) as serving:
        summary = await run_inline(tmp_path, *taught, "--trainer.loss.distillation.url", serving.url, *ended)
    assert summary.status is RunStatus.FAILED
    failed = [one for one in rollouts(tmp_path / "run") if one["outcome"]["state"] == "failed"]
    assert {one["outcome"]["reason"] for one in failed} == {"teacher_failed"}
    async with endpoint(teacher(lambda text: [1, 2]), paths=PATHS) as serving:
        with pytest.raises(ModelError, match="has another tokenizer than the policy"):
            await run_inline(tmp_path / "other", *taught, "--trainer.loss.distillation.url", serving.url, *ended)


async def test_a_spent_error_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    async with endpoint(Answer(status=503)) as serving:
        judged = ("--environment.judge.url", serving.url, "--environment.judge.retries", "0")
        summary = await run_inline(tmp_path, *judged, "--max_steps", "1", "--rollouts.score_errors.max_count", "3")
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "groups' scores failed, which rollouts.score_errors does not allow (max_count = 3)" in summary.reason
    assert "answered 503" in summary.reason


async def test_what_is_kept_unscored_is_written_down_and_never_trained_on(tmp_path: Path) -> None:
    def every_other(request: dict[str, list[Message]]) -> Answer:
        number = len(serving.asked)
        return Answer(status=503) if number % 2 else verdict({"1": 0.0, "2": 1.0})

    async with endpoint(every_other) as serving:
        judged = ("--environment.judge.url", serving.url, "--environment.judge.retries", "0")
        keep = ("--rollouts.score_errors.on_error", "keep_unscored")
        summary = await run_inline(tmp_path, *judged, *keep, "--max_steps", "2")
    assert summary.status is RunStatus.FINISHED
    unscored = [one for one in rollouts(tmp_path / "run") if one["outcome"]["reason"] == "unscored"]
    assert {(one["outcome"]["state"], one["reward"]) for one in unscored} == {("filtered", None)}
    assert all(one["messages"] for one in unscored)


async def test_reward_functions_of_the_settings_are_what_a_run_trains_on(tmp_path: Path) -> None:
    summary = await run_inline(
        *(tmp_path, "--max_steps", "1"),
        *("--environment.rewards.length.function", "tests.support.named_rewards:length"),
        *("--environment.rewards.slow.function", "tests.support.named_rewards:slow"),
        *("--environment.rewards.slow.weight", "2"),
    )
    assert summary.status is RunStatus.FINISHED
    trained = [one for one in rollouts(tmp_path / "run") if one["outcome"]["state"] == "trained"]
    assert len(trained) == 4
    for one in trained:
        assert one["reward_components"]["slow"] == 0.25
        assert one["reward"] == one["reward_components"]["length"] + 0.5
