"""A teacher on an engine of the run: a model folder beside the policy, and nothing else to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.records import RunStatus
from tests.run.runs import command, environment, records, run_inline
from tests.support.bundled_models import BUNDLED, rename_a_token, save_smaller, save_with_other_weights
from tests.support.chat_models import save_chat_model

RUN = (
    *(*environment("praising"), "--trainer.learning_rate", "3e-3", "--schedule", "sync"),
    *("--scheduling.filter_zero_spread", "true", "--max_epochs", "24"),
)


def taught_by(model: str, top_k: int = 0) -> tuple[str, ...]:
    named = ("--trainer.loss.distillation.top_k", str(top_k)) if top_k else ()
    return (*RUN, "--trainer.loss.distillation.model", model, *named)


@pytest.mark.parametrize("top_k", [0, 8])
async def test_a_policy_is_trained_on_what_a_model_says_that_the_run_itself_serves(tmp_path: Path, top_k: int) -> None:
    teacher = save_with_other_weights(tmp_path / "teacher")
    summary = await run_inline(tmp_path, *taught_by(teacher, top_k), "--max_steps", "3")
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 3)
    assert summary.ledger.by_state["trained"] == 3 * 4
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert all(line["training/distillation"] > 0.01 for line in lines)
    assert all(line["training/grad_norm"] > 0.01 for line in lines)
    assert all(line["training/reward_loss"] == 0 for line in lines)
    assert sum(line["teacher/calls"] for line in lines) >= 3 * 4


@pytest.mark.parametrize("top_k", [0, 8])
async def test_a_policy_that_is_its_own_teacher_has_nothing_to_learn(tmp_path: Path, top_k: int) -> None:
    once = ("--trainer.learning_rate", "1e-12", "--max_steps", "1")
    await run_inline(tmp_path, *taught_by(BUNDLED, top_k), *once)
    (line,) = records(tmp_path / "run" / "metrics.jsonl")
    assert abs(line["training/distillation"]) < 1e-4


def test_a_teacher_is_a_process_of_its_own(tmp_path: Path) -> None:
    teacher = save_smaller(tmp_path / "teacher")
    with command(tmp_path, *taught_by(teacher, 4), "--max_steps", "2") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert "is scored by the teacher" in printed
    assert {path.name for path in (run.folder / "logs").iterdir()} == {
        *("orchestrator.log", "trainer.log", "generator.log", "teacher.log"),
    }
    assert sum(line["teacher/scored_tokens"] for line in records(run.folder / "metrics.jsonl")) > 0


async def test_a_teacher_that_does_not_fit_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    other, renamed = str(save_chat_model(tmp_path / "other")), save_smaller(tmp_path / "renamed")
    rename_a_token(tmp_path / "renamed")
    for teacher, why in (
        (other, "holds no weights"),
        (str(tmp_path / "nothing"), "nothing"),
        (renamed, r"trainer.loss.distillation.model is .*renamed', which has another vocabulary than 'bundled"),
    ):
        with pytest.raises(ModelError, match=why):
            await run_inline(tmp_path / "runs", *taught_by(teacher), "--max_steps", "1")
    assert not [*tmp_path.glob("runs/*/rollouts")]
    long = ("--generator.max_cache_tokens", "1024", "--scheduling.row_tokens", "1024")
    with pytest.raises(ModelError, match=r"made for \d+ tokens, and a rollout's branch may have \d+, with one"):
        await run_inline(tmp_path, *taught_by(save_smaller(tmp_path / "short")), *long, "--max_steps", "1")
