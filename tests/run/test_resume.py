"""Going on from the newest checkpoint: as if the run had never been interrupted."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tailrace.cli import main
from tailrace.config import RUNS, load_settings
from tailrace.errors import SettingsError
from tailrace.records import CheckpointWritten, RunStatus, StepTrained, TrainerStarted
from tailrace.reporting.summary import RunSummary, read_summary, summary_text, write_summary
from tailrace.run.training import train
from tests.run.runs import RESUMED, WITHOUT_MODEL, command, environment, records, rollouts, run_inline, trained_tasks
from tests.support.event_files import read_events

DATA = (
    *(*environment("words"), "--environment.args.count", "20", "--environment.args.held_out", "0"),
    *("--scheduling.max_staleness", "10"),
)
"""20 tasks; 2 a step. No token gets too old, however late a busy machine installs new weights."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def resumed(parent: Path) -> RunSummary:
    asyncio.run(run_inline(parent, *DATA, "--max_steps", "3"))
    return asyncio.run(run_inline(parent, *DATA, "--max_steps", "100", "--max_epochs", "1", *RESUMED))


def test_steps_go_on_until_the_data_is_exhausted(resumed: RunSummary) -> None:
    assert (resumed.status, resumed.exit_code, resumed.steps) == (RunStatus.FINISHED, 0, 10)
    assert "max_epochs" in resumed.reason


def test_no_task_is_skipped_or_trained_twice_across_the_seam(parent: Path, resumed: RunSummary) -> None:
    groups = Counter(trained_tasks(parent / "run"))
    assert groups == {f"words/train/{index}": 2 for index in range(20)}


def test_metrics_go_on_where_they_ended(parent: Path, resumed: RunSummary) -> None:
    assert [line["step"] for line in records(parent / "run" / "metrics.jsonl")] == list(range(1, 11))


def test_the_figures_are_those_of_both_starts(parent: Path, resumed: RunSummary) -> None:
    lines = records(parent / "run" / "metrics.jsonl")
    written = Counter(record["outcome"]["state"] for record in rollouts(parent / "run"))
    assert resumed.starts == 2
    assert "2 starts" in summary_text(resumed)
    assert resumed.ledger.balances
    assert resumed.ledger.by_state["trained"] == written["trained"] == 40
    assert resumed.tokens_trained == sum(line["batch/loss_tokens"] for line in lines)
    assert resumed.tokens_generated == sum(line["rollout/generated_tokens"] for line in lines)
    assert resumed.tokens_generated == sum(record["completion_tokens"] for record in rollouts(parent / "run"))
    assert resumed.cpu_s == pytest.approx(sum(line["cpu/run_s"] for line in lines))
    assert resumed.reward_first == lines[0]["reward/mean"]
    assert resumed.length_ratio is not None


def test_nothing_that_counts_since_the_run_began_falls_at_the_seam(parent: Path, resumed: RunSummary) -> None:
    lines = records(parent / "run" / "metrics.jsonl")
    for name in ("wall_s", "scheduler/admitted", "policy/version"):
        values = [line[name] for line in lines]
        assert values == sorted(values), name
    assert lines[3]["scheduler/admitted"] > lines[2]["scheduler/admitted"]
    assert lines[3]["wall_s"] > lines[2]["wall_s"] > 0
    assert resumed.wall_s > lines[-1]["wall_s"]


def test_the_events_of_both_starts_are_kept(parent: Path, resumed: RunSummary) -> None:
    events = read_events(parent / "run" / "events.jsonl")
    assert [event.step for event in events if isinstance(event, TrainerStarted)] == [0, 3]
    assert [event.step for event in events if isinstance(event, StepTrained)] == list(range(1, 11))
    assert len({event.epoch for event in events}) == 2


async def test_a_run_goes_on_with_its_own_settings_and_others_only_where_that_is_allowed(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "1", "--trainer.learning_rate", "7e-4")
    config = tmp_path / "run" / "config.toml"
    before = config.read_bytes()
    summary = await train(load_settings("quickstart", ["--name", "run", "--resume"], tmp_path), tmp_path)
    assert (summary.exit_code, summary.steps, summary.starts) == (0, 1, 2)
    assert config.read_bytes() == before
    more = ["--name", "run", "--resume", "--max_steps", "2"]
    with pytest.raises(SettingsError, match="max_steps = 2 in place of 1"):
        await train(load_settings("quickstart", more, tmp_path), tmp_path)
    summary = await train(load_settings("quickstart", [*more, "--allow-changed-settings"], tmp_path), tmp_path)
    assert (summary.exit_code, summary.steps) == (0, 2)
    assert (tmp_path / "run" / "superseded" / "config_1.toml").read_bytes() == before
    assert "learning_rate = 0.0007" in config.read_text()
    assert "Goes on with max_steps = 2 in place of 1." in (tmp_path / "run" / "logs" / "orchestrator.log").read_text()


LORA = ("--trainer.lora.rank", "4")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command has them."""
    monkeypatch.chdir(tmp_path)
    return RUNS


@pytest.mark.parametrize(
    ("begun", "given", "message"),
    [
        (LORA, ("--trainer.lora.rank", "8"), r"its rank (4) would be 8; leave trainer.lora.rank as it was"),
        (LORA, ("--trainer.lora.targets", "q_proj,o_proj"), "would be o_proj, q_proj; leave trainer.lora.targets as"),
        (LORA, ("--trainer.lora.rank", "unset"), "and this run trains all weights: write trainer.lora.rank = 4"),
        ((), LORA, "is of a run that trains all weights, and trainer.lora.rank asks for an adapter"),
        (
            ("--trainer.optimizer", "muon"),
            ("--trainer.optimizer", "adamw"),
            "has the moments of 'muon', and this run's is 'adamw'; write trainer.optimizer = 'muon' as it was",
        ),
    ],
)
async def test_settings_that_its_checkpoint_is_not_of_are_refused_and_the_run_goes_on_without_them(
    begun: tuple[str, ...], given: tuple[str, ...], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await run_inline(runs, *DATA, *begun, "--max_steps", "1")
    assert (first.exit_code, first.steps) == (0, 1)
    config = runs / "run" / "config.toml"
    before = config.read_bytes()
    with pytest.raises(SettingsError, match=re.escape(message)):
        await run_inline(runs, *DATA, *begun, *given, *RESUMED)
    others = [*given, "--max_steps", "2", "--allow-changed-settings"]
    assert main(["train", str(config), "--resume", "--dry-run", *others]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert (config.read_bytes(), [*config.parent.glob("superseded/*")]) == (before, [])
    summary = await train(load_settings(str(config), [*RESUMED, "--max_steps", "2"], runs), runs)
    assert (summary.exit_code, summary.steps) == (0, 2)


async def test_a_resume_that_fails_as_it_is_composed_leaves_a_summary_with_the_figures_of_before(
    tmp_path: Path,
) -> None:
    before = await run_inline(tmp_path / "runs", *DATA, "--max_steps", "2")
    (tmp_path / "runs" / "run" / "summary.json").unlink()  # as if killed
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        command(tmp_path, *DATA, *WITHOUT_MODEL, *RESUMED, "--gateway.port", str(taken.getsockname()[1])) as run,
    ):
        status, printed = run.wait()
    assert status == 2, printed
    summary = read_summary(run.folder)
    assert summary is not None
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 2)
    assert "cannot listen there" in summary.reason
    assert (summary.steps, summary.starts, summary.ledger) == (2, 1, before.ledger)
    assert summary.tokens_trained == before.tokens_trained > 0
    assert (tmp_path / summary.checkpoint_path).name == "step_000002"
    assert 0 < summary.wall_s <= before.wall_s


async def test_steps_after_the_checkpoint_are_trained_again_and_told_once(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "4", "--trainer.checkpoint_every_steps", "2")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")  # as if killed before it was written
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "10", "--max_epochs", "1", *RESUMED)
    assert (summary.steps, summary.starts, summary.ledger.by_state["trained"]) == (10, 2, 40)
    assert [line["step"] for line in records(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 11))
    assert Counter(trained_tasks(tmp_path / "run")) == {f"words/train/{index}": 2 for index in range(20)}
    assert {record["step"] for record in rollouts(tmp_path / "run")} <= set(range(1, 12))
    superseded = records(tmp_path / "run" / "superseded" / "metrics.jsonl")
    assert [line["step"] for line in superseded] == [3, 4]
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert summary.ledger.by_reason["cancelled"]["resumed"] == lines[1]["scheduler/in_flight"] > 0
    assert lines[2]["rollout/cancelled/resumed"] == lines[1]["scheduler/in_flight"]
    assert summary.ledger.balances


@pytest.mark.parametrize(("at", "step"), [("state", 4), ("trained", 4)], ids=["before sending", "before saving"])
async def test_a_crash_around_the_batch_of_a_step_costs_no_task(tmp_path: Path, at: str, step: int) -> None:
    folder = tmp_path / "runs" / "run"
    killed = (*environment("killed"), "--environment.args.at", at, "--environment.args.step", str(step))
    with command(
        tmp_path,
        *(*killed, "--environment.args.folder", str(folder), "--scheduling.max_staleness", "10"),
        *("--max_steps", "10", "--trainer.checkpoint_every_steps", "2", "--placement", "inline"),
    ) as run:
        assert run.wait()[0] == -signal.SIGKILL
    assert (folder / "scheduler" / "step_000004.json").is_file()
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_000002"]
    summary = await run_inline(tmp_path / "runs", *DATA, "--max_steps", "100", "--max_epochs", "1", *RESUMED)
    assert summary.steps == 10
    assert Counter(trained_tasks(folder)) == {f"words/train/{index}": 2 for index in range(20)}
    names = [record["rollout_id"] for record in rollouts(folder)]
    assert len(set(names)) == len(names)


async def test_a_checkpoint_without_its_scheduler_state_is_refused(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "1")
    shutil.rmtree(tmp_path / "run" / "scheduler")
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "2", *RESUMED)
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "the checkpoint of step 1 cannot be resumed without" in summary.reason


async def test_no_rollout_of_a_resumed_run_has_a_name_that_was_given_before(tmp_path: Path) -> None:
    one_task, checkpoints = (*DATA, "--environment.args.count", "1"), tmp_path / "run" / "checkpoints"
    await run_inline(tmp_path, *one_task, "--max_steps", "1", "--trainer.checkpoint_every_steps", "1")
    for _ in range(2):  # both from the same checkpoint, as if the first one had been killed
        shutil.rmtree(checkpoints / "step_000002", ignore_errors=True)
        await run_inline(tmp_path, *one_task, "--max_steps", "2", *RESUMED)
    written = [*rollouts(tmp_path / "run"), *records(tmp_path / "run" / "superseded" / "step_000002.jsonl")]
    names = [record["rollout_id"] for record in written]
    assert len(set(names)) == len(names) >= 12


async def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "2")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "2", *RESUMED)
    assert (summary.exit_code, summary.steps, summary.ledger.by_state["trained"]) == (0, 2, 8)


async def test_a_run_that_is_through_has_nothing_more_to_train(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "2")
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "2", *RESUMED)
    assert (summary.status, summary.steps, summary.ledger.by_state["trained"]) == (RunStatus.FINISHED, 2, 8)
    assert summary.checkpoint_path == str(tmp_path / "run" / "checkpoints" / "step_000002")


async def test_what_a_run_took_covers_start_up_and_end_of_all_its_starts(tmp_path: Path) -> None:
    first = await run_inline(tmp_path, *DATA, "--max_steps", "2")
    slow = msgspec.structs.replace(first, wall_s=first.wall_s + 100.0)  # as if it had started slowly
    write_summary(tmp_path / "run", slow)
    nothing_to_do = await run_inline(tmp_path, *DATA, "--max_steps", "2", *RESUMED)
    assert nothing_to_do.wall_s > slow.wall_s
    assert (await run_inline(tmp_path, *DATA, "--max_steps", "3", *RESUMED)).wall_s > nothing_to_do.wall_s
    clock_s = records(tmp_path / "run" / "metrics.jsonl")[-1]["wall_s"]
    (tmp_path / "run" / "summary.json").write_text("{}")  # that of another version
    assert clock_s < (await run_inline(tmp_path, *DATA, "--max_steps", "3", *RESUMED)).wall_s < slow.wall_s


async def test_a_start_that_came_to_nothing_still_knows_the_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "2", "--trainer.checkpoint_every_steps", "1")
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "4", "--trainer.loss.name", "math:pi", *RESUMED)
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FAILED, 2, 2)
    assert summary.checkpoint_path == str(tmp_path / "run" / "checkpoints" / "step_000002")


async def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "1")
    (tmp_path / "run" / "checkpoints" / "step_000001" / "manifest.json").unlink()
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "2", *RESUMED)
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "step_000001 is no checkpoint" in summary.reason


async def test_a_damaged_checkpoint_fails_the_run(tmp_path: Path) -> None:
    await run_inline(tmp_path, *DATA, "--max_steps", "1")
    (tmp_path / "run" / "checkpoints" / "step_000001" / "trainer.pt").write_bytes(b"rubbish")
    summary = await run_inline(tmp_path, *DATA, "--max_steps", "2", *RESUMED)
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert "step_000001 is damaged" in summary.reason


async def test_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    await run_inline(
        tmp_path, *DATA, "--max_steps", "3", "--trainer.checkpoint_every_steps", "1", "--trainer.keep_checkpoints", "1"
    )
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointWritten)] == [1, 2, 3]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000003"]
