"""What a run that finishes leaves behind."""

from __future__ import annotations

import asyncio
import math
import os
import re
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.config import SettingsFile, load_settings
from tailrace.errors import DataError
from tailrace.records import CheckpointWritten, Event, RunStatus, StepTrained, TrainerEnded, TrainerStarted
from tailrace.reporting.metrics import METRICS
from tailrace.reporting.summary import RunSummary, read_summary
from tailrace.reporting.tokens import read_rollout, token_files
from tailrace.reporting.tokens.files import is_beside_rollouts
from tailrace.run.folder import RunPaths, count_starts, record_settings, saved_step, wind_back
from tests.run.runs import REPORT, RESUMED, length_ratio, records, rollouts, run_inline, tiny_settings, warm_from
from tests.support.chrome_trace import crossings, read_trace, spans, tracks
from tests.support.event_files import read_events
from tests.support.long_runs import STEPS as LONG_STEPS
from tests.support.long_runs import write_long_metrics
from tests.support.memory_peaks import at_most_at_once

STEPS = 4
CHOSEN = (
    *("--max_steps", str(STEPS), "--schedule", "one-step-off"),
    *("--trainer.export_tokens", "jsonl", "--observability.tokens_every_steps", "2"),
)

pytestmark = pytest.mark.xdist_group("run folder")
"""One run serves them all: in one of the test command's processes."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def summary(parent: Path) -> RunSummary:
    return asyncio.run(run_inline(parent, *CHOSEN, *REPORT, "--trainer.checkpoint_every_steps", "2"))


@pytest.fixture(scope="module")
def folder(parent: Path, summary: RunSummary) -> Path:
    return parent / "run"


def test_settings_and_metrics_that_are_replaced_outlive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, synced = RunPaths(tmp_path / "run"), set[int]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    record_settings(tiny_settings(parent=tmp_path), paths, SettingsFile("settings", {}))
    paths.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    wind_back(paths, 1)
    assert paths.metrics.read_text() == '{"step": 1}\n'
    assert {path.stat().st_ino for path in (paths.settings, paths.recipe, paths.metrics, paths.root)} <= synced


def test_what_a_full_disk_cut_short_is_left_out_where_a_run_is_resumed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.metrics.write_text('{"step": 1}\n{"step": 2, "rew\n{"step": 2}\n{"ste')
    wind_back(paths, 2)
    assert paths.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not paths.superseded.exists()


def test_a_line_that_was_cut_short_takes_none_of_the_next_superseded_ones_with_it(tmp_path: Path) -> None:
    paths, name = RunPaths(tmp_path), "step_000003.jsonl"
    paths.rollouts.mkdir()
    for text in ('{"rollout_id": "a"}\n{"roll', '{"rollout_id": "b"}\n'):
        (paths.rollouts / name).write_text(text)
        wind_back(paths, 2)
    assert (paths.superseded / name).read_text().splitlines()[1:] == ['{"roll', '{"rollout_id": "b"}']


def test_a_long_run_is_wound_back_line_by_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    line_bytes = write_long_metrics(paths.metrics)
    before = paths.metrics.read_bytes()
    with at_most_at_once(50 * line_bytes):
        wind_back(paths, LONG_STEPS - 900)
    kept, gone = paths.metrics.read_bytes(), (paths.superseded / "metrics.jsonl").read_bytes()
    assert (kept + gone, gone.count(b"\n")) == (before, 900)
    inode = paths.metrics.stat().st_ino
    wind_back(paths, LONG_STEPS - 900)
    assert (paths.metrics.stat().st_ino, (paths.superseded / "metrics.jsonl").read_bytes()) == (inode, gone)


def test_a_run_finishes_after_max_steps(summary: RunSummary) -> None:
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, STEPS)
    assert summary.policy_version == STEPS


def test_the_folder_holds_what_the_map_says(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        *("config.toml", "events.jsonl", "metrics.jsonl", "summary.json", "report.html", "reward.png"),
        "trace.json",
        *("rollouts", "checkpoints", "scheduler", "logs", "tokens"),
    }
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "report.html").read_text()


def test_exported_tokens_are_those_of_the_trained_rollouts(folder: Path) -> None:
    trained = {one["rollout_id"]: one for one in rollouts(folder) if one["outcome"]["state"] == "trained"}
    tokens = [one for path in sorted((folder / "tokens").glob("*.jsonl")) for one in records(path)]
    assert {one["rollout_id"] for one in tokens} == set(trained)
    for rollout_id, rollout in trained.items():
        own = [one for one in tokens if one["rollout_id"] == rollout_id]
        assert {one["environment"] for one in own} == {rollout["environment"]}
        assert len(own) <= rollout["completion_tokens"]


def test_rollouts_of_the_steps_asked_for_are_there_token_by_token(folder: Path) -> None:
    assert [file.step for file in token_files(folder)] == [2, 4]
    written = [one for one in rollouts(folder) if one["step"] in (2, 4)]
    assert any(one["outcome"]["state"] == "trained" for one in written)
    for one in written:
        branches = read_rollout(folder, one["rollout_id"], step=one["step"])
        assert len(branches) == one["branches"]
        assert sum(branch.num_tokens for branch in branches) == one["tokens"]
        logprobs = np.concatenate([branch.generator_logprobs for branch in branches])
        assert np.nanmean(logprobs) == pytest.approx(one["mean_logprob"], abs=1e-6)
        assert {branch.key.reward for branch in branches} == {one["reward"]}
        for branch in branches:
            is_trained = one["outcome"]["state"] == "trained"
            assert (branch.trainer is not None) == is_trained
            if branch.trainer is not None:
                assert (branch.trainer.is_trained == branch.loss_mask).all()
                ratios = np.exp(branch.trainer.logprobs - branch.generator_logprobs)[branch.loss_mask]
                assert branch.trainer.ratios[branch.loss_mask] == pytest.approx(ratios, rel=1e-5)
                assert np.nanmean(branch.advantages) == pytest.approx(one["advantage"], abs=1e-6)


def test_the_trainer_exports_the_steps_whose_rollouts_are_written(tmp_path: Path) -> None:
    asyncio.run(run_inline(tmp_path, "--max_steps", "3", "--observability.tokens_every_steps", "2"))
    names = {path.name for path in (tmp_path / "run/tokens").iterdir()}
    assert names == {"step_000002.parquet", "step_000002_rank_0.parquet"}
    assert is_beside_rollouts(tmp_path / "run/tokens/step_000002_rank_0.parquet")
    trained = next(one for one in rollouts(tmp_path / "run") if one["outcome"].get("step") == 2)
    (branch,) = read_rollout(tmp_path / "run", trained["rollout_id"], step=2)
    assert branch.trainer is not None


def test_trackers_are_told_what_the_folder_says(tmp_path: Path) -> None:
    own = "tests.reporting.trackers.own:Lines"
    chosen = ("--observability.trackers", own, "--observability.tracker_rollouts_every_steps", "2")
    done = asyncio.run(run_inline(tmp_path, "--max_steps", "2", *chosen))
    told = [
        msgspec.json.decode(line) for line in (tmp_path / "run/trackers/Lines/told.jsonl").read_bytes().splitlines()
    ]
    lines = [{"step": step, "wall_s": wall_s, **metrics} for kind, step, wall_s, metrics in _of(told, "log")]
    assert lines == records(tmp_path / "run/metrics.jsonl")
    assert lines[0]["tracker/Lines/dropped_records"] == 0
    assert [note[1] for note in _of(told, "rollouts")] == [2]
    assert [note[2] for note in _of(told, "checkpoint")] == [done.checkpoint_path]
    assert told[-1] == ["end", msgspec.json.decode((tmp_path / "run/summary.json").read_bytes())]


def _of(notes: list[list[Any]], kind: str) -> list[list[Any]]:
    return [note for note in notes if note[0] == kind]


def test_the_trace_is_valid_and_the_report_shows_the_lag_of_each_phase(folder: Path) -> None:
    events = read_trace(folder / "trace.json")
    assert len(spans(events, "train")) == STEPS
    assert {"rollouts", "batches", "optimizer steps", "weights"} <= tracks(events)["orchestrator"]
    assert crossings(events) == []
    page = (folder / "report.html").read_text()
    for phase in ("generate", "score", "advantages", "train", "optimizer", "record"):
        assert f"<td>{phase}</td>" in page
    assert f"tailrace.phases: step {STEPS}: " in (folder / "logs" / "orchestrator.log").read_text()
    assert any(line.get("phase/advantages/lag_max_s") for line in records(folder / "metrics.jsonl"))


def test_the_settings_can_be_run_again(folder: Path) -> None:
    again = load_settings(str(folder / "config.toml"))
    expected = tiny_settings("--placement", "inline", *CHOSEN)
    assert again.model_dump(exclude={"observability", "trainer"}) == expected.model_dump(
        exclude={"observability", "trainer"}
    )


def test_the_events_tell_the_run_from_start_to_end(folder: Path) -> None:
    events = read_events(folder / "events.jsonl")
    assert isinstance(events[0], TrainerStarted)
    assert isinstance(events[-1], TrainerEnded)
    assert [event.step for event in events if isinstance(event, StepTrained)] == [1, 2, 3, 4]


def test_every_metric_is_a_documented_one(folder: Path, summary: RunSummary) -> None:
    """Of families, those with the names that this run has."""
    lines = records(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    names = {
        "environment": ["words"],
        "component": [],
        "reason": [reason for counts in summary.ledger.by_reason.values() for reason in counts],
        "replica": ["generator"],
        "role": ["run"],
        "name": _phases(folder),
    }
    documented = {
        metric.replace(f"{{{family}}}", name) for metric in METRICS for family in names for name in names[family]
    }
    assert {name for line in lines for name in line} <= documented | {"step", "wall_s"}


def test_the_reward_of_a_step_is_that_of_the_rollouts_in_its_file(folder: Path) -> None:
    written = rollouts(folder)
    for line in records(folder / "metrics.jsonl"):
        ended = [one for one in written if one["step"] == line["step"]]
        trained = [one["reward"] for one in ended if one["outcome"]["state"] == "trained"]
        assert line["batch/reward_mean"] == pytest.approx(statistics.fmean(trained))
        filtered = [one["reward"] for one in ended if one["outcome"]["state"] == "filtered"]
        assert line["reward/mean"] == pytest.approx(statistics.fmean(trained + filtered))


def _phases(folder: Path) -> list[str]:
    """Those that the report lists."""
    return re.findall(r"<td>(\w+)</td>", (folder / "report.html").read_text())


def test_the_summary_says_what_the_files_say(folder: Path, summary: RunSummary) -> None:
    assert read_summary(folder) == summary
    lines = records(folder / "metrics.jsonl")
    assert summary.tokens_trained == sum(line["batch/loss_tokens"] for line in lines)
    assert summary.masked_tokens == sum(line["batch/masked_tokens"] for line in lines)
    assert summary.staleness_max == max(line["staleness/max"] for line in lines)
    staleness = sum(line["staleness/mean"] * line["batch/loss_tokens"] for line in lines)
    assert summary.staleness_mean == pytest.approx(staleness / summary.tokens_trained)
    told, written = lines[-1]["bias/length_ratio"], rollouts(folder)
    until_then = [record for record in written if record["step"] <= STEPS]
    begins = warm_from(written, summary.length_ratio)
    assert any(length_ratio(until_then, begin) == pytest.approx(told) for begin in begins)


def test_the_ledger_balances_and_counts_what_the_rollout_files_hold(folder: Path, summary: RunSummary) -> None:
    ledger = summary.ledger
    assert ledger.balances
    assert ledger.in_flight == 0
    written = [record["outcome"]["state"] for record in rollouts(folder)]
    assert written.count("trained") == ledger.by_state["trained"] == 4 * STEPS
    assert written.count("filtered") == ledger.by_state["filtered"]


def test_the_lengths_are_those_of_the_rollout_files(folder: Path, summary: RunSummary) -> None:
    trained = [record for record in rollouts(folder) if record["outcome"]["state"] == "trained"]
    lengths = [record["completion_tokens"] for record in trained]
    assert sum(lengths) == summary.tokens_trained + summary.masked_tokens
    assert summary.tokens_generated >= sum(record["completion_tokens"] for record in rollouts(folder))
    for record in trained:
        staleness = record["step"] - 1 - record["versions"]["max"]
        assert 0 <= staleness <= 4


def test_rollout_files_hold_what_went_in(folder: Path) -> None:
    record = rollouts(folder)[0]
    assert record["task"]["word"].startswith("word ")
    assert record["sampling"]["temperature"] == 1.0
    assert [message["role"] for message in record["messages"]][-2:] == ["user", "assistant"]
    assert math.isfinite(record["reward"])


def test_the_checkpoint_is_a_model_of_transformers(folder: Path, summary: RunSummary) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]
    newest = Path(summary.checkpoint_path)
    assert newest.name == "step_000004"
    assert AutoModelForCausalLM.from_pretrained(newest).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(newest).chat_template


async def test_a_folder_that_is_there_is_never_overwritten(parent: Path, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(DataError, match="add --resume"):
        await run_inline(parent, "--max_steps", "1")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


async def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to resume"):
        await run_inline(tmp_path, "--max_steps", "1", *RESUMED)
    assert not list(tmp_path.iterdir())


def test_a_start_counts_once_however_often_its_trainer_was_started_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    starts = [TrainerStarted(epoch=epoch, step=step, version=step) for epoch, step in (("a", 0), ("a", 3), ("b", 7))]
    torn = b'{"type":"TrainerStarted","ep\n'
    paths.events.write_bytes(b"".join(msgspec.json.encode(start) + b"\n" for start in starts) + torn)
    assert count_starts(paths) == 2


def test_the_checkpoint_that_was_told_of_last_is_that_of_the_history_in_use(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert saved_step(paths) == 0

    def started(step: int) -> Event:
        return TrainerStarted(epoch="a", step=step, version=step)

    def saved(step: int) -> Event:
        return CheckpointWritten(epoch="a", step=step, path="elsewhere")

    with paths.events.open("ab") as file:
        for event, newest in (
            (started(0), 0),
            (saved(2), 2),
            (saved(4), 4),
            (started(5), 4),
            (started(3), 2),  # from here on step 4 is another one
            (started(6), 2),
            (saved(8), 8),
        ):
            file.write(msgspec.json.encode(event) + b"\n")
            file.flush()
            assert saved_step(paths) == newest
