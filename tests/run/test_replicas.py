"""Runs with several generators, some of which die or get stuck in the middle: nothing is lost, nobody notices."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from tailrace.reporting.summary import read_summary
from tailrace.run.orchestrator import RUN_ENDED
from tests.run.runs import ROLES, Command, command, records

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

TWO_REPLICAS = (
    *("--generator.replicas", "2", "--generator.chunk_tokens", "4", "--rollouts.max_tokens", "48"),
    *("--generator.router.report_every_s", "0.1", "--max_steps", "10000"),
)
QUICKLY_STUCK = ("--generator.router.progress_deadline_s", "4")


def figure(run: Command, name: str) -> float:
    """The newest value of a metric."""
    return float(next((line[name] for line in reversed(records(run.folder / "metrics.jsonl")) if name in line), 0.0))


def wait_for_return(run: Command, replica: str) -> None:
    """Until a replica was started again and serves weights of the run."""
    name = f"generator/{replica}"
    run.wait_until(lambda: figure(run, f"{name}/restarts") > 0 and figure(run, f"{name}/serving") == 1)
    assert figure(run, f"{name}/policy_version") > 0


def lose_a_replica(run: Command, blow: str) -> psutil.Process:
    """While it serves."""
    run.wait_until(lambda: figure(run, "generator/generator-0/requests") > 0)
    victim = run.role("generator-0")
    getattr(victim, blow)()
    return victim


def stop_with_requests(run: Command) -> psutil.Process:
    """A replica that is stopped and has requests in hand: one may have answered its last just before."""
    while True:
        victim = lose_a_replica(run, "suspend")
        run.wait_for_steps(len(records(run.folder / "metrics.jsonl")) + 2)  # one line may be of before
        if figure(run, "generator/generator-0/requests") > 0:
            return victim
        with contextlib.suppress(psutil.NoSuchProcess):  # on a slow machine it was found stuck, and killed
            victim.resume()


@pytest.mark.parametrize("roles", ROLES)
def test_a_replica_killed_in_mid_batch_costs_no_rollout(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with command(tmp_path, *roles, *TWO_REPLICAS, *QUICKLY_STUCK) as run:
        victim = stop_with_requests(run)
        with contextlib.suppress(psutil.NoSuchProcess):  # as above
            victim.kill()
        require_nothing_lost(run, victim)


@pytest.mark.parametrize("roles", ROLES)
def test_a_replica_that_gets_stuck_in_mid_batch_costs_no_rollout(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with command(tmp_path, *roles, *TWO_REPLICAS, *QUICKLY_STUCK) as run:
        require_nothing_lost(run, stop_with_requests(run))


def require_nothing_lost(run: Command, victim: psutil.Process) -> None:
    """The replica is replaced, and no rollout ends for any other reason than the run's own end."""
    run.wait_until(lambda: figure(run, "generator/generator-0/restarts") > 0)  # told by a step: the rest goes on
    run.process.terminate()
    status, printed = run.wait()
    assert (status, run.leftovers(), psutil.pid_exists(victim.pid)) == (143, [], False), printed
    assert "generator-0 is started again" in printed
    ledger = read_summary(run.folder).ledger
    assert ledger.balances
    assert ledger.by_state["failed"] == 0, printed
    assert set(ledger.by_reason["cancelled"]) <= {RUN_ENDED, "SIGTERM"}
    assert figure(run, "generator/generator-0/failovers") > 0


@pytest.mark.parametrize("roles", ROLES)
def test_a_replica_that_was_killed_comes_back_with_the_weights_of_the_run(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    with command(tmp_path, *roles, *TWO_REPLICAS) as run:
        victim = lose_a_replica(run, "kill")
        wait_for_return(run, "generator-0")
        assert victim.pid != run.role("generator-0").pid
        run.process.terminate()
        status, printed = run.wait()
        assert (status, run.leftovers()) == (143, []), printed
    assert read_summary(run.folder).ledger.balances


@pytest.mark.parametrize("roles", ROLES)
def test_a_run_fails_with_its_last_generator(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with command(tmp_path, *roles, *TWO_REPLICAS, "--generator.restart", "never") as run:
        lose_a_replica(run, "kill")
        run.wait_until(lambda: "given up" in (run.folder / "logs" / "orchestrator.log").read_text())
        run.wait_for_steps(len(records(run.folder / "metrics.jsonl")) + 2)
        run.role("generator-1").kill()
        status, printed = run.wait()
        assert (status, run.leftovers()) == (1, []), printed
    assert "generator-0 is given up, 1 of the run's generators are left" in printed
    assert "the generator-1 left early, killed by SIGKILL; the end of its log" in printed
    assert read_summary(run.folder).ledger.balances
