from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tailrace.dashboard.folders import RunState, RunTable, find_runs
from tailrace.records import Json, RunStatus
from tests.support.made_runs import MadeRun


def state_of(folder: Path) -> RunState:
    (row,) = RunTable().rows(find_runs(folder))
    return row.state


def test_how_a_run_stands(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "run")
    run.write_steps(3)
    run.own(os.getpid())
    assert state_of(run.folder) is RunState.RUNNING
    then_s = time.time() - 600
    os.utime(run.folder / "owner.json", (then_s, then_s))  # before a reboot, say: another process has the number
    assert state_of(run.folder) is RunState.CRASHED
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    run.own(ended.pid)
    assert state_of(run.folder) is RunState.CRASHED  # a zombie
    ended.wait()
    assert state_of(run.folder) is RunState.CRASHED
    (run.folder / "owner.json").unlink()
    assert state_of(run.folder) is RunState.CRASHED
    run.finish(RunStatus.FAILED)
    assert state_of(run.folder) is RunState.FAILED


def test_a_run_that_was_resumed_and_killed_is_not_called_finished(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "run").write_all()
    (row,) = RunTable().rows(find_runs(run.folder))
    assert (row.state, row.reason) == (RunState.FINISHED, "max_steps reached")
    run.own(2**22 + 1)
    (row,) = RunTable().rows(find_runs(run.folder))
    assert (row.state, row.reason) == (RunState.CRASHED, "")  # that of the start before says nothing of this one


def test_a_row_tells_of_the_newest_step_and_follows_it(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "runs" / "a", steps=9)
    run.write_steps(2)
    table = RunTable()
    (row,) = table.rows(find_runs(tmp_path / "runs"))
    assert (row.id, row.steps, row.max_steps, row.environments) == ("a", 2, 9, ["sort"])
    assert row.reward is not None
    assert row.reward_first is not None
    run.write_steps(1)
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":4,"reward/me')
    (row,) = table.rows(find_runs(tmp_path / "runs"))
    assert row.steps == 3


def test_the_newest_evaluation_is_told_however_many_steps_ago_it_was(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "run", settings={"evaluation": {"every_steps": 100}})
    run.write_steps(1)
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":1,"eval/sort/tasks":8,"eval/sort/reward/mean":0.25}\n')
        file.write(b'{"step":1,"eval/sort/tasks":8,"eval/sort/reward/mean":0.75}\n')
        file.writelines(b'{"step":%d,"reward/mean":0.5,"text":"%s"}\n' % (step, b"x" * 9_000) for step in range(2, 60))
    (row,) = RunTable().rows(find_runs(run.folder))
    assert (row.steps, row.held_out) == (59, 0.75)


def test_the_first_reward_is_that_of_the_first_step_also_behind_an_evaluation(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "run")
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":0,"eval/sort/tasks":8,"eval/sort/reward/mean":0.25}\n')
        file.writelines(b'{"step":%d,"reward/mean":0.%d}\n' % (step, step) for step in (2, 3))
    (row,) = RunTable().rows(find_runs(run.folder))
    assert (row.reward_first, row.reward) == (0.2, 0.3)


def test_a_step_of_however_many_generators_has_a_row(tmp_path: Path) -> None:
    run = MadeRun(folder=tmp_path / "run")
    generators = {f"generator/generator_{number}/requests_of_all_kinds": 1.0 for number in range(6_000)}
    with (run.folder / "metrics.jsonl").open("ab") as file:
        for step in (1, 2):
            file.write(
                msgspec.json.encode({"step": step} | generators | {"reward/mean": step / 4, "wall_s": 9.0}) + b"\n"
            )
            file.write(b'{"step":%d,"eval/sort/reward/mean":0.25}\n' % step)
    (row,) = RunTable().rows(find_runs(run.folder))
    assert (row.steps, row.reward_first, row.reward, row.wall_s, row.held_out) == (2, 0.25, 0.5, 9.0, 0.25)


def test_settings_that_differ_and_seeds_of_one_family(tmp_path: Path) -> None:
    for port, (name, seed, rate) in enumerate((("a", 0, 1.0), ("b", 1, 1.0), ("c", 0, 2.0)), 8_000):
        of_place = {"gateway": {"port": port}, "generator": {"devices": [port]}, "resume": name == "b"}
        MadeRun(folder=tmp_path / name, seed=seed, settings={"trainer": {"learning_rate": rate}, **of_place})
    rows = {row.id: row for row in RunTable().rows(find_runs(tmp_path))}
    assert {name: bytes(row.differing["trainer.learning_rate"]) for name, row in rows.items()} == {
        "a": b"1.0",
        "b": b"1.0",
        "c": b"2.0",
    }
    assert rows["a"].family == rows["b"].family != rows["c"].family


def test_keys_in_which_runs_differ_are_masked_and_tell_them_apart(tmp_path: Path) -> None:
    for name, seed, key in (("a", 0, "sesame"), ("b", 1, "sesame"), ("c", 0, "mellon")):
        environment: dict[str, Json] = {"name": "mcp", "args": {"command": ["server"], "env": {"API_KEY": key}}}
        MadeRun(folder=tmp_path / name, seed=seed, settings={"environments": [environment]})
    rows = {row.id: row for row in RunTable().rows(find_runs(tmp_path))}
    assert [bytes(row.differing["environments.0.args.env.API_KEY"]) for row in rows.values()] == [b'"***"'] * 3
    assert rows["a"].family == rows["b"].family != rows["c"].family


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"{", b"[1"])
def test_files_of_nonsense_cost_nobody_the_table(tmp_path: Path, content: bytes) -> None:
    for name in ("config.toml", "metrics.jsonl", "events.jsonl", "summary.json", "owner.json"):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / name).write_bytes(content)
    MadeRun(folder=tmp_path / "good").write_all()
    states = {row.id: row.state for row in RunTable().rows(find_runs(tmp_path))}
    assert states == {"bad": RunState.CRASHED, "good": RunState.FINISHED}


def test_nothing_else_is_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    assert find_runs(tmp_path) == {}
    assert find_runs(tmp_path / "none") == {}
