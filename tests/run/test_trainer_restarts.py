"""Runs whose trainer is killed: it goes on from its newest checkpoint, and what no checkpoint had is trained again.

What is long here has a cell of its own, without a model, among those of `test_fault_matrix.py` tried each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, cast

import pytest

from tailrace.config.restarts import RestartSettings
from tailrace.errors import LifecycleError
from tailrace.free_ports import free_port
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.restarts import RestartHistory
from tailrace.lifecycle.roles import RoleSpec
from tailrace.records import ModelStateDictPublished, RunStatus, StepSkipped, StepTrained, TrainerStarted
from tailrace.reporting.metrics import StepMetrics
from tailrace.reporting.summary import read_summary
from tailrace.run.callbacks import Callbacks
from tailrace.run.ranks import Rank
from tailrace.run.started_roles import RoleStarter
from tailrace.run.trainer_lives import TrainerLives, describe_lives
from tailrace.run.trainer_ranks import LaunchedRanks
from tailrace.run.training import train
from tailrace.transport.batches.queue import BatchSender, MemoryBatchQueue
from tailrace.transport.events.log import MemoryEventLog
from tests.run.runs import ROLES, WITHOUT_MODEL, Command, command, records, role_of, tiny_settings, trained_tasks
from tests.run.test_router_replay import save_mixtral
from tests.support.event_files import read_events
from tests.support.faults import Fault
from tests.support.losses import MARK

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

FRESH = ("--scheduling.max_staleness", "10")
"""No token gets too old, however late a busy machine installs new weights."""


def kill_trainer(run: Command, name: str = "trainer") -> int:
    """As soon as it is there; its process id."""
    while True:
        with contextlib.suppress(AssertionError):
            victim = run.role(name)
            victim.kill()
            return victim.pid
        assert run.process.poll() is None, run.wait()


def wait_until_it_trains(run: Command, roles: tuple[str, ...], fault: Fault, steps: int, number: int = 0) -> None:
    """Until so many steps are told; or, where steps without a model take no time, for a trainer that waits in one."""
    if roles:
        run.wait_until(fault.mark(f"reached-{number}").exists)
    else:
        run.wait_for_steps(steps)


def require_one_history(run: Command, steps: int) -> None:
    """Every step is told once, every task is trained once, versions only grow."""
    lines = records(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for name in ("policy/version", "generator/generator/policy_version", "wall_s"):
        values = [line[name] for line in lines]
        assert values == sorted(values), name
    assert set(Counter(trained_tasks(run.folder)).values()) == {2}
    summary = read_summary(run.folder)
    assert (summary.status, summary.steps, summary.starts) == (RunStatus.FINISHED, steps, 1)
    assert summary.ledger.balances
    assert summary.ledger.by_state["failed"] == 0


class OneRank:
    """Starts a trainer that does nothing, and is not started again; it is its own transports."""

    def __init__(self, launcher: LocalLauncher, launched: LaunchedRanks | None = None) -> None:
        self._launcher, self.transports, self.launched = launcher, self, launched

    def start_trainer(self) -> list[RoleHandle]:
        settings = str(self._launcher.logs.parent).encode()
        spec = RoleSpec("trainer", "tests.support.light_roles:leave_when_told", settings)
        return [self._launcher.start(spec, is_replaceable=True)]

    def batch_sender(self) -> BatchSender:
        return MemoryBatchQueue()

    def serve_log(self, log: MemoryEventLog) -> Callable[[], Awaitable[None]]:
        return log.close


async def test_states_stay_back_to_the_checkpoint_that_the_trainer_told_of(tmp_path: Path) -> None:
    """It may write the next one already, where this machine does not see it."""
    async with LocalLauncher("epoch", tmp_path / "logs") as launcher:
        never = RestartHistory(RestartSettings(per_role=0))
        trainer = TrainerLives(cast(RoleStarter, OneRank(launcher)), MemoryEventLog("epoch"), never)
        trainer.started(2)
        assert [trainer.earliest_step(step) for step in (2, 3, 9)] == [2, 2, 2]
        trainer.saved(7)
        assert trainer.earliest_step(9) == 7
        await trainer.close()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_trainer_that_loads_hears_its_end_where_another_launcher_started_its_other_ranks(
    tmp_path: Path, elsewhere: bool
) -> None:
    """Killed as it loads, it would leave them in their own load, and then waiting for it."""
    launched = LaunchedRanks(Rank(number=0, size=2, host="127.0.0.1", port=free_port())) if elsewhere else None
    async with LocalLauncher("epoch", tmp_path / "logs") as launcher:
        never = RestartHistory(RestartSettings(per_role=0))
        trainer = TrainerLives(cast(RoleStarter, OneRank(launcher, launched)), MemoryEventLog("epoch"), never)
        assert trainer.is_loading != elsewhere
        trainer.started(0)
        assert not trainer.is_loading
        await trainer.close()


async def test_a_trainer_that_loads_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    """It hears nothing before it has loaded, and this one never has."""
    async with LocalLauncher("epoch", tmp_path / "logs") as launcher:
        never = RestartHistory(RestartSettings(per_role=0))
        trainer = TrainerLives(cast(RoleStarter, OneRank(launcher)), MemoryEventLog("epoch"), never)
        async with asyncio.timeout(30):
            await trainer.leave()
        assert "trainer" not in launcher.pids()
        await trainer.close()


async def test_a_log_is_ended_though_the_system_holds_a_trainer_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hold(rank: RoleHandle) -> NoReturn:
        raise LifecycleError("the system holds it")

    async with LocalLauncher("epoch", tmp_path / "logs") as launcher:
        log, never = MemoryEventLog("epoch"), RestartHistory(RestartSettings(per_role=0))
        trainer = TrainerLives(cast(RoleStarter, OneRank(launcher)), log, never)
        with monkeypatch.context() as held:
            held.setattr(RoleHandle, "kill", hold)
            with pytest.raises(LifecycleError, match="the system holds it"):
                await trainer.leave()
        assert log.closed
        await trainer.close()


@pytest.mark.parametrize(
    ("checkpoint_every_steps", "again"), [("3", range(1, 40)), pytest.param("0", [0], marks=pytest.mark.long)]
)
@pytest.mark.parametrize("roles", ROLES)
def test_a_trainer_that_is_killed_goes_on_from_its_newest_checkpoint_and_no_step_is_lost(
    tmp_path: Path, roles: tuple[str, ...], checkpoint_every_steps: str, again: range | list[int]
) -> None:
    fault = Fault(tmp_path / "fault", "trainer", "killed", "trainer step")
    fault.folder.mkdir()
    often = ("--trainer.checkpoint_every_steps", checkpoint_every_steps, "--max_steps", "40")
    with command(tmp_path, *FRESH, *roles, *often, variables=fault.variables) as run:
        wait_until_it_trains(run, roles, fault, steps=5)
        if again != [0]:  # written beside training: the step may be told long before
            run.wait_until(lambda: any((run.folder / "checkpoints").glob("step_*")))
        kill_trainer(run)
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert "the trainer is started again: the trainer left early, killed by SIGKILL" in printed
    require_one_history(run, 40)
    events = read_events(run.folder / "events.jsonl")
    first, second = (event.step for event in events if isinstance(event, TrainerStarted))
    assert first == 0
    assert second in again
    published = [event.ref for event in events if isinstance(event, ModelStateDictPublished)]
    assert len({ref.uri.split("-")[3] for ref in published}) == 2  # by two processes
    assert records(run.folder / "metrics.jsonl")[-1]["training/restarts"] == 1


@pytest.mark.long
def test_a_trainer_that_is_stopped_is_killed_for_its_silence_and_replaced(tmp_path: Path) -> None:
    hasty = ("--restarts.silence_s", "4", "--max_steps", "30", "--trainer.checkpoint_every_steps", "4")
    with command(tmp_path, *FRESH, *hasty) as run:
        run.wait_for_steps(5)
        run.role("trainer").suspend()
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert "the trainer was killed: it was stopped, and gave no sign of life for " in printed
    require_one_history(run, 30)


@pytest.mark.long
def test_a_trainer_that_is_stopped_for_a_moment_goes_on_as_if_nothing_was(tmp_path: Path) -> None:
    with command(tmp_path, *FRESH, "--max_steps", "30") as run:
        run.wait_for_steps(5)
        trainer = run.role("trainer")
        trainer.suspend()
        time.sleep(1.5)
        trainer.resume()
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    require_one_history(run, 30)
    assert records(run.folder / "metrics.jsonl")[-1]["training/restarts"] == 0


@pytest.mark.parametrize("loss", [pytest.param("leaving", marks=pytest.mark.long), "dying_in_a_save"])
def test_a_trainer_that_leaves_with_status_0_or_dies_in_a_save_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path / "done once"))
    often = ("--trainer.checkpoint_every_steps", "4", "--max_steps", "12")
    with command(tmp_path, *FRESH, *often, "--trainer.loss.name", f"tests.support.losses:{loss}") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    ended = "with status 0" if loss == "leaving" else "killed by SIGKILL"
    assert f"the trainer is started again: the trainer left early, {ended}" in printed
    require_one_history(run, 12)


def test_batches_that_are_trained_again_find_the_experts_that_they_were_sampled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path / "done once"))
    experts = ("--model.name", str(save_mixtral(tmp_path / "mixtral")), "--generator.return_routed_experts", "true")
    dying = ("--trainer.loss.name", "tests.support.losses:dying", "--trainer.checkpoint_every_steps", "0")
    with command(tmp_path, *FRESH, *experts, *dying, "--max_steps", "8") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert "the trainer is started again" in printed
    assert "recorded experts are gone" not in printed + (run.folder / "logs" / "trainer.log").read_text()
    require_one_history(run, 8)
    told = [event for event in read_events(run.folder / "events.jsonl") if isinstance(event, StepTrained)]
    shares = {(event.step, event.metrics["training/replayed_share"]) for event in told}
    assert len(told) > len(shares) == 8  # some twice, and alike
    assert min(share for _, share in shares) > 0.5


def test_steps_keep_their_versions_where_other_ones_are_skipped_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path / "done once"))
    fickle = ("--trainer.loss.name", "tests.support.losses:fickle", "--trainer.checkpoint_every_steps", "0")
    with command(tmp_path, *FRESH, *fickle, "--max_steps", "12") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    lives: list[dict[int, StepTrained | StepSkipped]] = []
    for event in read_events(run.folder / "events.jsonl"):
        if isinstance(event, TrainerStarted):
            lives.append({})
        elif isinstance(event, StepTrained | StepSkipped):
            lives[-1][event.step] = event
    first, second = lives
    assert len(first) > 4
    assert list(second) == list(range(1, 13))
    assert [second[step].version for step in first] == [event.version for event in first.values()]
    assert second[12].version == 11  # one was skipped the first time
    skipped = {event.step: event.reason for event in second.values() if isinstance(event, StepSkipped)}
    assert sorted(skipped.values()) == ["non_finite", "skipped_before"]
    assert {step for step in skipped if isinstance(first[step], StepTrained)} == {
        step for step, reason in skipped.items() if reason == "non_finite"
    }
    lines = {line["step"]: line["policy/skipped_steps"] for line in records(run.folder / "metrics.jsonl")}
    assert lines == {step: isinstance(event, StepSkipped) for step, event in (second | first).items()}
    summary = read_summary(run.folder)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 12)
    assert summary.ledger.balances


@pytest.mark.long
def test_a_trainer_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    with command(tmp_path, *FRESH, "--max_steps", "3") as run:
        kill_trainer(run)
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    require_one_history(run, 3)


def test_a_notice_while_the_trainer_loads_ends_the_run_at_once_with_no_save(tmp_path: Path) -> None:
    fault = Fault(tmp_path / "fault", "trainer", "stopped", "trainer startup")  # where it waits, as nobody strikes it
    fault.folder.mkdir()
    with command(tmp_path, *WITHOUT_MODEL, "--max_steps", "3", variables=fault.variables) as run:
        run.wait_until(fault.mark("reached-0").exists)
        (run.folder / "preempt").touch()
        status, printed = run.wait()
        assert (status, run.leftovers()) == (75, []), printed
    summary = read_summary(run.folder)
    assert (summary.status, summary.steps, summary.checkpoint_path) == (RunStatus.CANCELLED, 0, "")
    assert summary.reason == "orchestrator: preempted"


def test_a_signal_in_the_pause_before_a_trainer_is_started_again_ends_the_run_with_its_status(tmp_path: Path) -> None:
    with command(tmp_path, *WITHOUT_MODEL, "--restarts.backoff_s", "30", "--max_steps", "100000") as run:
        log = run.folder / "logs" / "orchestrator.log"
        for restarts in (1, 2):  # the second one pauses
            run.wait_for_steps(restarts)
            kill_trainer(run)
            run.wait_until(lambda: log.read_text().count("the trainer is started again") == restarts)  # noqa: B023
        run.process.send_signal(signal.SIGTERM)
        status, printed = run.wait()
        assert (status, run.leftovers()) == (143, []), printed
    summary = read_summary(run.folder)
    assert summary.status is RunStatus.CANCELLED
    assert summary.ledger.balances


async def test_so_does_one_where_the_run_was_about_to_finish(tmp_path: Path) -> None:
    log, events = tmp_path / "run" / "logs" / "orchestrator.log", tmp_path / "run" / "events.jsonl"

    async def finish(metrics: StepMetrics) -> bool:
        """Asks for the end while the trainer, killed twice, is not started again."""
        for restarts in (1, 2):  # the second one pauses
            await holds(lambda: events.read_text().count("TrainerStarted") == restarts)  # noqa: B023
            role_of(os.getpid(), tmp_path / "run", "trainer").kill()
            await holds(lambda: log.read_text().count("the trainer is started again") == restarts)  # noqa: B023
        return True

    async def holds(condition: Callable[[], bool]) -> None:
        while not (condition() or running.done()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    chosen = (*WITHOUT_MODEL, "--restarts.backoff_s", "30", "--max_steps", "100000", "--observability.live", "off")
    running = asyncio.create_task(train(tiny_settings(*chosen, parent=tmp_path), tmp_path, callbacks=Callbacks(finish)))
    await holds(lambda: events.is_file() and "asked for the end" in events.read_text())
    signal.raise_signal(signal.SIGTERM)
    summary = await running
    assert (summary.status, summary.exit_code) == (RunStatus.CANCELLED, 143)
    assert summary.ledger.balances


@pytest.mark.parametrize("roles", ROLES)
def test_a_trainer_whose_batches_are_not_kept_fails_the_run(tmp_path: Path, roles: tuple[str, ...]) -> None:
    kept = ("--restarts.retained_mb", "0", "--trainer.checkpoint_every_steps", "0")
    with command(tmp_path, *FRESH, *roles, *kept, "--max_steps", "10000") as run:
        run.wait_for_steps(4)
        kill_trainer(run)
        status, printed = run.wait()
        assert (status, run.leftovers()) == (1, []), printed
    summary = read_summary(run.folder)
    assert "the trainer ended, and cannot go on after step 0: the batches of steps 1 to " in summary.reason
    assert "are not kept any more (restarts.retained_mb)" in summary.reason
    assert summary.status is RunStatus.FAILED
    assert summary.ledger.balances


@pytest.mark.long
def test_a_trainer_that_ends_too_often_fails_the_run_by_its_name(tmp_path: Path) -> None:
    with command(tmp_path, *FRESH, "--max_steps", "10000", "--restarts.per_role", "1") as run:
        run.wait_for_steps(1)
        first = kill_trainer(run)
        log = run.folder / "events.jsonl"
        run.wait_until(lambda: sum(isinstance(event, TrainerStarted) for event in read_events(log)) == 2)
        assert kill_trainer(run) != first
        status, printed = run.wait()
        assert (status, run.leftovers()) == (1, []), printed
    summary = read_summary(run.folder)
    assert "the trainer left early, killed by SIGKILL; the end of its log" in summary.reason
    assert summary.ledger.balances


@pytest.mark.parametrize(
    ("overrides", "launched", "why"),
    [
        ((), False, None),
        (
            ("--generator.return_routed_experts", "true"),
            False,
            r"with their routed experts, come to restarts\.retained_mb = 1024 at most",
        ),
        (("--trainer.ranks", "2"), True, "another launcher started its ranks"),
        (("--trainer.ranks", "2", "--restarts.per_role", "0"), True, None),
    ],
)
def test_a_run_whose_trainer_is_not_started_again_says_so_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], launched: bool, why: str | None
) -> None:
    if launched:
        monkeypatch.setenv("SLURM_PROCID", "0")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    sentences = describe_lives(tiny_settings(*overrides))
    assert [why is not None and re.search(why, sentence) is not None for sentence in sentences] == [True] * bool(why)
