from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config.simulating import list_plans, load_plans
from tailrace.errors import SettingsError
from tailrace.simulation import simulate
from tailrace.simulation.charts import timeline_png
from tests.support.lost_output import full_disk

PLAN = """
steps = 4
warmup_steps = 1
engines = { replicas = 2, slots = 4 }
trainer = { train_s = 2.0, sync_s = 0.5 }

[load]
group_size = 2
max_tokens = 1000
lengths = { mean_log = 3.0, sigma = 0.5, task_sigma = 0.2 }

[scheduling]
batch_size = 4
row_tokens = 4096

[[policies]]
name = "sync"
schedule = "sync"

[[policies]]
name = "small buffer"
scheduling = { buffer_batches = 0.5 }
"""


SYNC_OF_4 = "schedule = 'sync' means scheduling.max_staleness = 0, but it is 4: leave it out, or write"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return str(file)


def test_a_plan_is_simulated_once_per_policy_and_value(plan: str) -> None:
    plans = load_plans(plan, ["--engines.slots", "8"], sweep="max_staleness=0,2")
    assert [one.name for one in plans] == [
        "sync, max_staleness = 0",
        "small buffer, max_staleness = 0",
        "small buffer, max_staleness = 2",
    ]
    assert [one.max_staleness for one in plans] == [0, 0, 2]
    assert {one.engines.slots for one in plans} == {8}
    assert {one.scheduling.batch_size for one in plans} == {4}


def test_the_command_prints_a_table_and_draws_timelines(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png = tmp_path / "timeline.png"
    assert main(["simulate", plan, "--png", str(png)]) == 0
    printed = capsys.readouterr().out
    assert "small buffer" in printed
    assert "staleness, mean" in printed
    assert png.read_bytes().startswith(b"\x89PNG")


def test_timelines_are_drawn_where_the_table_cannot_be_printed(plan: str, tmp_path: Path) -> None:
    png = tmp_path / "timeline.png"
    simulation = [sys.executable, "-m", "tailrace", "simulate", plan, "--png", str(png)]
    with full_disk() as full:
        done = subprocess.run(simulation, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "standard output takes nothing more" in done.stderr) == (1, True), done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_table_is_printed_where_timelines_cannot_be_saved(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", plan, "--png", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "small buffer" in printed.out
    assert "--png: cannot write /dev/full: No space left on device" in printed.err


def test_the_command_prints_figures_for_programs(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", plan, "--json", "--steps", "12"]) == 0
    sync, buffered = json.loads(capsys.readouterr().out)
    assert sync["policy"] == "sync"
    assert sync["staleness_shares"] == {"0": 1.0}
    assert buffered["groups_per_s"] >= sync["groups_per_s"]


def test_the_command_says_which_of_a_sweep_contradicts_a_policy(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", plan, "--json", "--sweep", "max_staleness=0,4"]) == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert [one["policy"] for one in figures] == [
        f"{policy}, max_staleness = {bound}"
        for policy, bound in (("sync", 0), ("small buffer", 0), ("small buffer", 4))
    ]
    assert f"sync, max_staleness = 4 is left out: {SYNC_OF_4}" in printed.err


def test_a_plan_that_contradicts_itself_is_refused_whatever_is_swept_beside(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('schedule = "sync"\nscheduling = { max_staleness = 4 }\n')
    for sweep in (None, "engines.slots=32,64"):
        with pytest.raises(SettingsError, match=re.escape(SYNC_OF_4)):
            load_plans(str(file), sweep=sweep)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "there is no plan 'nowhere'. Plans: long-tail"),
        (["long-tail", "--engines.slot", "3"], "did you mean engines.slots"),
        (["long-tail", "--sweep", "max_staleness"], "KEY=VALUE"),
        (["long-tail", "--sweep", "max_staleness=0,x"], "command line: scheduling.max_staleness = 'x'"),
        (["long-tail", "--warmup_steps", "90"], "nothing is measured"),
        (["long-tail", "--scheduling.max_staleness", "4"], SYNC_OF_4),
        (
            ["stragglers", "--schedule", "sync", "--sweep", "max_staleness=4,8"],
            f"max_staleness = 4 is left out: {SYNC_OF_4}",
        ),
        (["long-tail", "--png", "/"], "--png: cannot write /: Is a directory"),
        (["long-tail", "--png", "/nonexistent/x.png"], "--png: cannot write /nonexistent/x.png: No such file"),
    ],
)
def test_what_cannot_be_simulated_is_told(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""


def test_every_packaged_plan_is_possible() -> None:
    assert list_plans()
    for name in list_plans():
        assert load_plans(name)


def test_a_plan_that_says_one_thing_of_a_section_keeps_a_plans_defaults_of_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text("steps = 40\n")
    (routed,) = load_plans(str(file), ["--engines.router.report_every_s", "1"])
    router = routed.engines.router
    assert (router.policy, router.loading_share, router.report_every_s) == ("least_loaded", 1.0, 1.0)
    plans = load_plans(str(file), ["--scheduling.max_staleness", "2", "--load.max_tokens", "4096"])
    plans += load_plans(str(file), sweep="max_staleness=1,4")
    found = [(one.scheduling.batch_size, one.scheduling.row_tokens, one.max_staleness) for one in plans]
    assert found == [(512, 32_768, max_staleness) for max_staleness in (2, 1, 4)]


def test_a_wrong_setting_of_a_policy_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN + 'on_stael = "mask"\n')
    with pytest.raises(SettingsError, match=r"on_stael is no setting"):
        load_plans(str(file))


def test_the_same_run_is_drawn_alike(plan: str) -> None:
    runs = [simulate(one) for one in load_plans(plan)]
    assert timeline_png(runs) == timeline_png(runs)
