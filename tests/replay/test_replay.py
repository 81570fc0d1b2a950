from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config import load_settings, placed, read_settings_file
from tailrace.errors import DataError, SettingsError
from tailrace.replay.command import captured, made_up, parse_bytes, replay
from tailrace.replay.experts import num_bytes
from tailrace.reporting.logs import logging_as_it_was
from tailrace.run.training import train
from tests.run.runs import TINY, records, run_inline

SCORED = """\
from tailrace.environments import EnvironmentSpec, single_turn_agent

def reward(task, messages):
    return float(len(messages[-1]["content"]))

scored = EnvironmentSpec(
    name="scored", agent=single_turn_agent(), reward=reward, train_tasks=[{"prompt": f"Say {n}"} for n in range(4)]
)
"""
STAGES = ["advantages", "sample", "form_batch", "send_batch", "receive_batch", "record"]


async def test_what_a_run_captured_goes_through_the_pipeline_again(tmp_path: Path) -> None:
    await run_inline(tmp_path, "--max_steps", "2", "--observability.capture", "2")
    plan = captured(tmp_path / "run")
    trained = {record["rollout_id"] for record in _trained(tmp_path / "run")}
    assert trained <= {rollout.rollout_id for group in plan.captured for rollout in group.rollouts}
    costs = await replay(plan, repeat=2)
    assert [cost.phase for cost in costs] == ["idle loop", *STAGES, "all together"]
    assert all(cost.wall_s > 0 and cost.payload_bytes == num_bytes(plan.captured) > 0 for cost in costs)
    assert all(cost.lag_p50_s <= cost.lag_p99_s <= cost.lag_max_s for cost in costs)


def _trained(folder: Path) -> list[dict[str, object]]:
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [record for path in files for record in records(path) if record["outcome"]["state"] == "trained"]


async def test_one_phase_can_be_looked_at_beside_traffic_on_the_loop() -> None:
    costs = await replay(made_up("4x2", "1MB"), only="receive_batch", traffic=20, repeat=3)
    assert [cost.phase for cost in costs] == ["idle loop", "receive_batch"]


async def test_a_phase_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match="this replay has: advantages, sample"):
        await replay(made_up("2x1"), only="scoring")


async def test_a_capture_whose_environment_is_not_here_is_replayed_without_its_scores_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logging_as_it_was():
        await run_inline(tmp_path, "--max_steps", "1", "--observability.capture", "1")
    file = tmp_path / "run" / "capture" / "settings.json"
    file.write_text(file.read_text().replace("tests.support.run_environments:words", "not_here_any_more:words"))
    await replay(captured(tmp_path / "run"), only="sample", repeat=1)
    assert "score is left out: environment.name is 'not_here_any_more:words'" in caplog.text
    with pytest.raises(SettingsError, match=r"has: advantages, .*; score is left out: .*not_here_any_more"):
        await replay(captured(tmp_path / "run"), only="score")


async def test_a_module_beside_the_file_that_the_captured_run_began_with_scores_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "replayed_beside.py").write_text(SCORED)
    file = tmp_path / "mine.toml"
    file.write_text("[model]\nname = 'bundled:quickstart'\n[[environments]]\nname = 'replayed_beside:scored'\n")
    overrides = [*TINY, "--placement", "inline", "--max_steps", "1", "--observability.capture", "1"]
    settings = load_settings(str(file), overrides)
    with placed(str(file), overrides), logging_as_it_was():
        await train(settings, tmp_path / "runs", recipe=read_settings_file(str(file)))
    run = tmp_path / "runs" / "mine"
    for folder in (run, run / "capture"):
        del sys.modules["replayed_beside"]
        assert await asyncio.to_thread(main, ["replay", str(folder), "--phase", "score", "--repeat", "1"]) == 0
        assert "score" in capsys.readouterr().out


async def test_made_up_groups_are_as_large_as_asked() -> None:
    plan = made_up("4x2", "1MB")
    assert plan.load is not None
    assert plan.load.num_tokens == 4 * 2 * 2032
    (_, cost) = await replay(plan, only="advantages")
    assert cost.payload_bytes == pytest.approx(plan.load.num_tokens * 13 + 1_000_000, rel=0.05)


def test_sizes_are_read_as_people_write_them() -> None:
    assert (parse_bytes("8 GB"), parse_bytes("250mb"), parse_bytes("0")) == (8 * 10**9, 250 * 10**6, 0)
    for nonsense in ("much", "1TBX", "", "1.5.2GB", "."):
        with pytest.raises(SettingsError, match="1GB"):
            parse_bytes(nonsense)
    with pytest.raises(SettingsError, match="64x20"):
        made_up("64")


def test_a_folder_without_a_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no capture"):
        captured(tmp_path)


def test_the_command_prints_a_table_and_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--synthetic", "2x2", "--phase", "sample", "--repeat", "1", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "Lag p99" in printed
    assert printed.splitlines()[-1].startswith('[{"phase":"idle loop"')


def test_the_command_needs_to_know_what_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay"]) == 2
    assert "--synthetic 64x20" in capsys.readouterr().err
