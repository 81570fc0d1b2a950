"""Whole runs whose agents live in processes of their own: they train, lose nothing but attempts, and leave nothing."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.errors import SettingsError
from tailrace.run.evaluating import evaluate_model
from tailrace.run.training import train
from tests.run.runs import PATIENCE_S, WITHOUT_MODEL, command, environment, records, rollouts, tiny_settings
from tests.support import run_environments
from tests.support.agent_environments import MISBEHAVING
from tests.support.chrome_trace import read_trace, spans, tracks
from tests.support.descendants import still_run
from tests.support.faults import Fault

COSTS = {
    "sleep": ("worker_lost", r"/train/\d+: agent worker 0 was ended, .* held for over 5 s .* by misbehave"),
    "exit": ("worker_lost", r"/train/\d+: agent worker 0 ended with status 3 .*os._exit"),
    "crash": ("worker_lost", r"/train/\d+: agent worker 0 died of SIGSEGV in misbehave"),
    "sys.exit": ("environment_failed", r"/train/\d+: users' code raised SystemExit\(3\)"),
    "interrupt": ("environment_failed", r"/train/\d+: users' code raised KeyboardInterrupt"),
    "raise": ("environment_failed", r"/train/\d+: ZeroDivisionError: of the user"),
}
"""Why rollouts of agents fail that do this, by what they do."""

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")


def agent_workers(pid: int) -> list[psutil.Process]:
    """The processes that play rollouts, of this orchestrator."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "tailrace.rollouts.agent_workers.process" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
    return found


def test_a_run_with_agent_workers_finishes_though_one_is_killed(tmp_path: Path) -> None:
    with command(tmp_path, "--max_steps", "24", "--rollouts.agent_workers", "2") as run:
        run.wait_for_steps(2)
        children = psutil.Process(run.pid).children(recursive=True)
        log = run.folder / "logs" / "orchestrator.log"
        for killed, victim in enumerate(agent_workers(run.pid)):
            victim.kill()
            run.wait_until(lambda killed=killed: log.read_text().count("died of SIGKILL") > killed)
        status, printed = run.wait()
        assert (status, run.leftovers(), still_run(children, PATIENCE_S)) == (0, [], []), printed
    ended = rollouts(run.folder)
    trained = [record for record in ended if record["outcome"]["state"] == "trained"]
    ledger = json.loads((run.folder / "summary.json").read_text())["ledger"]
    assert ledger["in_flight"] == 0
    assert ledger["admitted"] == sum(ledger["by_state"].values())
    stale = ledger["by_reason"]["filtered"].get("stale", 0)  # waited for a sibling that was played again
    assert ledger["by_state"]["trained"] == len(trained) >= 24 * 4 - ledger["by_state"]["failed"] - stale
    assert ledger["by_reason"]["failed"].keys() <= {"worker_lost"}
    assert not any(record["columns"]["torch_is_imported"] for record in trained)
    lines = records(run.folder / "metrics.jsonl")
    for metric in ("agent_worker/0/rollouts", "agent_worker/1/restarts", "memory/agent_worker_0_rss_bytes"):
        assert any(metric in line for line in lines), metric
    events = read_trace(run.folder / "trace.json")
    assert tracks(events).keys() >= {"orchestrator", "agent worker 0", "agent worker 1"}
    assert spans(events, "rollout")


def test_agent_workers_start_while_the_trainer_loads_the_model(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    fault = Fault(marks, "trainer", "paused", "trainer startup")
    light = ("--environment.name", "tests.support.light_roles:playing", "--max_steps", "2")
    with command(tmp_path, *WITHOUT_MODEL, *light, variables=fault.variables) as run:
        run.wait_until(fault.mark("reached-0").exists)
        run.wait_until(lambda: bool(agent_workers(run.pid)))
        fault.place_mark("struck-0", "")
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed


def test_what_users_code_does_by_default_costs_its_own_rollouts_and_is_named(tmp_path: Path) -> None:
    overrides = ("--environment.name", "tests.support.agent_environments:misbehaving", "--rollouts.max_turns", "2")
    quick = ("--rollouts.agent_block_s", "5", "--scheduling.max_retries", "0")
    endless = ("--max_epochs", "1", "--max_steps", "1000")
    with command(tmp_path, *WITHOUT_MODEL, *overrides, *quick, *endless) as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    ended: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in rollouts(run.folder):
        ended[record["task"]["behave"]].append(record)
    for behave, (reason, message) in COSTS.items():
        failed = [record for record in ended[behave] if record["outcome"]["reason"] == reason]
        to_blame = [one for one in failed if reason != "worker_lost" or f"rollout {one['rollout_id']}" in one["error"]]
        assert len(to_blame) == 2, (behave, ended[behave])
        assert all(re.search(message, one["error"]) for one in to_blame), to_blame
    for behave in {*MISBEHAVING, "well"} - COSTS.keys():
        finished = [record for record in ended[behave] if record["outcome"]["state"] != "failed"]
        assert len(finished) == (18 if behave == "well" else 2), behave
    assert "Agents of misbehaving run in an agent worker" in (run.folder / "logs" / "orchestrator.log").read_text()


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_an_environment_that_cannot_be_closed_leaves_no_worker(tmp_path: Path, how: str) -> None:
    chosen = (*environment("closing"), "--environment.args.how", how, "--shutdown.cancel_rollouts_s", "2")
    with command(tmp_path, *WITHOUT_MODEL, *chosen, "--max_steps", "2") as run:
        run.wait_until(lambda: bool(agent_workers(run.pid)))
        workers = agent_workers(run.pid)
        status, printed = run.wait()
        assert (status, run.leftovers(), still_run(workers, PATIENCE_S)) == (0, [], []), printed
    if how == "raise":
        says = "environment 'closing' could not be closed: of the close"
        assert says in (run.folder / "logs" / "agent_workers.log").read_text()


async def test_an_evaluation_in_workers_is_the_one_on_the_loop(tmp_path: Path) -> None:
    found = []
    for workers in ("0", "2"):
        settings = tiny_settings("--rollouts.agent_workers", workers, "--placement", "local", parent=tmp_path)
        (one,) = await evaluate_model(settings)
        found.append(sorted((rollout.task.task_id, str(rollout.messages)) for rollout in one.rollouts))
    assert found[0] == found[1]
    assert len(found[0]) == 8


async def test_what_workers_cannot_play_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"keeps all in one process, but rollouts\.agent_workers is 1"):
        tiny_settings("--placement", "inline", "--rollouts.agent_workers", "1", parent=tmp_path)
    settings = tiny_settings("--rollouts.agent_workers", "1", "--environment.name", "words", parent=tmp_path)
    with pytest.raises(
        SettingsError, match=r"was given as an object, which rollouts\.agent_workers = 1 processes cannot"
    ):
        await train(settings, tmp_path, given={"words": run_environments.words()})
