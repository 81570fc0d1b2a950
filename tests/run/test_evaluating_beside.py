"""Evaluation beside training in whole runs: on the same engines, in nobody's ledger, told everywhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tailrace.errors import DataError
from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary, summary_text
from tailrace.run.orchestrator import RUN_ENDED
from tests.run.runs import REPORT, RESUMED, command, environment, records, run_inline, tiny_settings

EVALUATION = ("--evaluation.every_steps", "2", "--evaluation.tasks", "5", "--evaluation.share", "0.25")

pytestmark = pytest.mark.xdist_group("evaluating beside")
"""One run serves them all: in one of the test command's processes."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def summary(parent: Path) -> RunSummary:
    return asyncio.run(run_inline(parent, *REPORT, *EVALUATION, "--max_steps", "8"))


def test_metrics_have_a_line_for_every_evaluation(parent: Path, summary: RunSummary) -> None:
    lines = [line for line in records(parent / "run" / "metrics.jsonl") if "eval/words/tasks" in line]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert set(steps) <= {0, 2, 4, 6, 8}
    assert {0, 8} <= set(steps)  # the last is finished after training, those between may coalesce
    assert len(lines) + lines[-1]["eval/coalesced"] == 5
    for line in lines:
        assert line["eval/words/tasks"] == 5
        assert 0 <= line["eval/words/reward/mean"] <= 1
        low, high = line["eval/words/policy_version/min"], line["eval/words/policy_version/max"]
        assert line["step"] <= low <= high <= 8


def test_its_rollouts_are_saved_apart_and_are_in_no_ledger(parent: Path, summary: RunSummary) -> None:
    folder = parent / "run" / "rollouts"
    evaluated = [record for path in folder.glob("evaluation_*.jsonl") for record in records(path)]
    assert {record["outcome"]["reason"] for record in evaluated} == {"evaluation"}
    assert {record["task_id"].split("/")[1] for record in evaluated} == {"eval"}
    trained = [record for path in folder.glob("step_*.jsonl") for record in records(path)]
    assert {record["task_id"].split("/")[1] for record in trained} == {"train"}
    assert summary.ledger.balances
    assert "evaluation" not in summary.ledger.by_reason["filtered"]
    ended = Counter(record["outcome"]["state"] for record in trained)
    assert (ended["trained"], ended["filtered"]) == (32, summary.ledger.by_state["filtered"])
    assert summary.ledger.by_state["trained"] == 32
    assert summary.ledger.by_state["failed"] == 0
    assert set(summary.ledger.by_reason["cancelled"]) <= {RUN_ENDED}  # those that did not end: all evaluated ones did


def test_summary_and_report_tell_its_course(parent: Path, summary: RunSummary) -> None:
    course = summary.evaluations["words"]
    assert (course.step_last, course.tasks) == (8, 5)
    assert course.policy_version_min == course.policy_version_max == 8
    assert "held-out    words: " in summary_text(summary)
    page = (parent / "run" / "report.html").read_text()
    assert "Held-out reward" in page


def test_evaluation_samples_as_it_is_told_and_the_same_each_time(parent: Path, summary: RunSummary) -> None:
    folder = parent / "run" / "rollouts"
    first, last = (
        {record["task_id"]: record for record in records(folder / f"evaluation_{step:06d}.jsonl")} for step in (0, 8)
    )
    chosen = tiny_settings().rollouts.evaluation_sampling()
    assert first.keys() == last.keys()
    for task_id, record in first.items():
        assert record["sampling"] == last[task_id]["sampling"]
        assert record["sampling"]["temperature"] == chosen.temperature
    assert len({record["sampling"]["seed"] for record in first.values()}) == 5


async def test_a_stopped_run_cancels_it(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    signalling = (*environment("signalling"), "--environment.eval_tasks", "5", "--environment.args.after", str(metrics))
    summary = await run_inline(tmp_path, *signalling, *EVALUATION, "--max_steps", "1000")
    assert (summary.status, summary.exit_code) == (RunStatus.CANCELLED, 130)
    assert summary.ledger.balances


async def test_one_that_a_crash_took_is_made_up_for_where_the_run_goes_on(tmp_path: Path) -> None:
    await run_inline(tmp_path, *EVALUATION, "--max_steps", "3", "--evaluation.every_steps", "3")
    metrics = tmp_path / "run" / "metrics.jsonl"
    written = metrics.read_text().splitlines(keepends=True)
    assert '"eval/' in written[-1]  # of step 3
    metrics.write_text("".join(written[:-1]))
    await run_inline(tmp_path, *EVALUATION, "--max_steps", "4", "--evaluation.every_steps", "2", *RESUMED)
    assert [line["step"] for line in records(metrics) if "eval/words/tasks" in line] == [0, 3, 4]


async def test_data_that_is_exhausted_lets_the_last_evaluation_finish(tmp_path: Path) -> None:
    data = ("--environment.args.count", "12", "--environment.args.held_out", "4")
    ends = ("--max_steps", "unset", "--max_epochs", "1")
    summary = await run_inline(tmp_path, *data, *ends, *EVALUATION)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 4)
    assert summary.evaluations["words"].step_last == 4


async def test_an_evaluation_that_never_ends_is_cancelled_after_its_time(tmp_path: Path) -> None:
    hanging = (*environment("hanging_when_evaluated"), "--max_steps", "2", "--evaluation.finish_s", "0.2")
    summary = await run_inline(tmp_path, *hanging, *EVALUATION)
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, 2)
    assert summary.evaluations == {}
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    assert "the end of the run cancels the evaluation of step 0, step 2" in log


async def test_without_held_out_tasks_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no held-out task in words"):
        await run_inline(tmp_path, *EVALUATION, "--environment.args.held_out", "0", "--max_steps", "1")
    assert not (tmp_path / "run").exists()


def test_in_processes_of_their_own_the_last_evaluation_is_of_the_last_weights(tmp_path: Path) -> None:
    with command(tmp_path, *EVALUATION, "--max_steps", "4") as run:
        status, printed = run.wait()
    assert status == 0, printed
    assert "held-out    words: " in printed
    last = [line for line in records(run.folder / "metrics.jsonl") if "eval/words/tasks" in line][-1]
    assert (last["step"], last["eval/words/policy_version/min"], last["eval/words/policy_version/max"]) == (4, 4, 4)
