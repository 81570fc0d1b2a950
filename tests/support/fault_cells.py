"""The fault matrix: every cell is a run of light roles, one process of which is struck at one moment.

    {blows} x {generator, agent worker, trainer, one rank, orchestrator} x {startup, step, transfer, save, shutdown}

What becomes of the run is checked, and that nothing is left of it. Deadlines are scaled down by `deadline_scale`. What
only a process's own code can do, hang and ask for too much memory, comes where that code runs.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from pathlib import Path

import psutil

from tailrace.errors import DataError, TailraceError
from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary, read_summary
from tests.run.runs import PATIENCE_S, Command, command, records
from tests.support.descendants import still_run
from tests.support.fault_resources import DAMAGES, Within
from tests.support.faults import FAULT, NOTICED_S, Fault, Striker
from tests.support.light_roles import load_checkpoint

STEPS = 30
LIMIT_S = 30.0
"""From the fault to the end of the run's last process."""
LIGHT = (
    *("--placement", "tests.support.light_roles:LightLauncher", "--scheduling.max_staleness", "20"),
    *("--trainer.checkpoint_every_steps", "3", "--generator.router.report_every_s", "0.2"),
    *("--observability.report", "false", "--observability.live", "off", "--max_steps", str(STEPS)),
)
HASTY = (
    *("--deadline_scale", "0.2", "--restarts.backoff_s", "0.1"),
    *("--restarts.silence_s", "15", "--generator.router.progress_deadline_s", "40", "--shutdown.terminate_s", "10"),
)
"""A fifth of every deadline: these three become 3, 8 and 2 s."""
PATIENT = (
    *("--restarts.silence_s", "300", "--generator.router.progress_deadline_s", "300"),
    *("--rollouts.agent_block_s", "150"),
)
STUCK = ("--restarts.stuck_s", "50")
_ENDS_S = 10.0
_UNTOLD = 1
"""Steps of which an orchestrator that is killed may not have told, though a checkpoint contains them."""

VICTIMS = ("generator", "worker", "trainer", "trainer-1", "orchestrator")
MOMENTS = ("startup", "step", "transfer", "save", "shutdown")
_PLACES: Mapping[tuple[str, str], str] = {
    ("generator", "save"): "trainer save",
    ("generator", "shutdown"): "generator end",
    **{(victim, moment): f"trainer {moment}" for victim in ("worker", "trainer-1") for moment in ("transfer", "save")},
    ("worker", "shutdown"): "trainer last save",
    ("trainer", "shutdown"): "trainer end",
    ("trainer-1", "shutdown"): "trainer-1 end",
    **{("orchestrator", moment): f"trainer {moment}" for moment in ("step", "transfer", "save")},
    ("orchestrator", "shutdown"): "trainer end",
    ("folder", "shutdown"): "trainer end",
}
"""Where the run is at a moment; without an entry in the victim itself."""
_SETTINGS: Mapping[str, Sequence[str]] = {
    "worker": ("--environment.name", "tests.support.light_roles:playing", "--rollouts.agent_workers", "1"),
    "trainer-1": ("--trainer.ranks", "2"),
}
_REPLACED = r"is started again|A new one is started|it is started once more"


class End(Enum):
    """What becomes of a run."""

    FINISHES = "finishes"
    FAILS = "fails"
    ORPHANED = "its processes end without the orchestrator, and it can be resumed"
    EITHER = "finishes, or fails with a reason that names what was wrong"
    UNWRITTEN = "fails, and says so where it still can"
    REFUSED = "fails before its first step"


@dataclass(frozen=True)
class Cell:
    """One fault, and what is specified for it."""

    victim: str
    blow: str
    moment: str
    end: End = End.FINISHES
    says: str = ""
    """A pattern of what a run that failed gives as its reason."""
    replaces: bool | None = None
    """Whether the victim is started again; None where it may be."""
    place: str = ""
    times: int = 1
    is_asked_to_end: bool = False
    """Whether the orchestrator then gets SIGTERM, and again where that changes nothing."""
    settings: tuple[str, ...] = ()
    within: Within = Within.ANYTHING

    @property
    def name(self) -> str:
        """Of the cell among all."""
        return "-".join(
            (self.victim.replace("-", ""), self.moment.replace(" ", "_"), self.blow, *(["always"] * (self.times > 1)))
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings of the run."""
        haste = PATIENT if self.blow == "paused" else STUCK if self.blow == "hangs" and self.replaces else ()
        return (*LIGHT, *HASTY, *_SETTINGS.get(self.victim, ()), *haste, *self.settings)

    def fault(self, folder: Path) -> Fault:
        """With its marks in this folder."""
        where = self.place or _PLACES.get((self.victim, self.moment))
        there = "last save" if self.moment == "shutdown" else self.moment
        place = where or f"{'trainer' if self.is_damage else self.victim} {there}"
        return Fault(folder, "orchestrator" if self.is_damage else self.victim, self.blow, place, self.times)

    @property
    def may_end_alone(self) -> bool:
        """Whether it strikes the orchestrator when its roles may have left: what it held is then the next start's."""
        return (self.victim, self.moment) == ("orchestrator", "shutdown")

    @property
    def is_damage(self) -> bool:
        """Whether it strikes what a run stands on, and no process."""
        return self.blow in DAMAGES or not self.times


@dataclass
class Outcome:
    """What came of a cell."""

    name: str
    exit_s: float = 0.0
    """From the last blow to the end of the last process."""
    wrong: list[str] = field(default_factory=list)
    """What is not as it is specified."""
    leaks: list[str] = field(default_factory=list)
    """Processes, sockets, shared memory and locks that were left."""


# --- which there are --------------------------------------------------------------------------------------------------


def all_cells() -> list[Cell]:
    """Of the whole matrix."""
    return [*_from_outside(), *_by_itself(), *_again_and_again(), *_of_resources()]


def _from_outside() -> Iterator[Cell]:
    for victim, moment, blow in product(VICTIMS, MOMENTS, ("killed", "stopped", "paused", "leaves")):
        if blow == "paused":
            yield Cell(victim, blow, moment, replaces=False)
        elif victim == "orchestrator":
            yield Cell(victim, blow, moment, End.ORPHANED)
        else:
            yield Cell(victim, blow, moment, replaces=None if moment == "shutdown" else True)
    for victim in VICTIMS:
        yield Cell(victim, "deaf", "step", replaces=False)


def _by_itself() -> Iterator[Cell]:
    own = [(victim, moment) for victim in ("generator", "trainer", "trainer-1") for moment in ("startup", "step")]
    for victim, moment in [*own, ("worker", "step"), ("generator", "transfer"), ("trainer", "transfer")]:
        yield Cell(victim, "hangs", moment, replaces=True)
    yield Cell("worker", "hangs", "startup", replaces=True, settings=("--rollouts.worker_start_timeout_s", "60"))
    for victim in VICTIMS[:-1]:
        yield Cell(victim, "hangs", "shutdown")
    yield Cell("trainer", "hangs", "save", replaces=True)
    yield Cell("orchestrator", "hangs", "step", End.ORPHANED, is_asked_to_end=True)
    for victim, moment, says in (
        ("generator", "startup", "the generator left early, with status 1; .*MemoryError"),
        *(("trainer", moment, "MemoryError") for moment in MOMENTS[:-1]),
        ("trainer-1", "startup", "the trainer-1 left early, with status 1; .*MemoryError"),
        ("orchestrator", "startup", ""),
    ):
        yield Cell(victim, "exhausts", moment, End.FAILS, says)
    yield Cell("worker", "exhausts", "startup", End.REFUSED, "raised MemoryError")
    for victim in ("generator", "trainer-1"):
        yield Cell(victim, "exhausts", "step", replaces=True)
    yield Cell("generator", "exhausts", "transfer", replaces=False)  # it is sent the weights again
    yield Cell("worker", "exhausts", "step")


def _again_and_again() -> Iterator[Cell]:
    for victim, times, told in (
        ("generator", 2, "the generator left early, killed by SIGKILL; the end of its log"),
        ("trainer", 2, "the trainer left early, killed by SIGKILL; the end of its log"),
        ("trainer-1", 2, "the trainer-1 left early, killed by SIGKILL; the end of its log"),
        ("worker", 2, "agent worker 0 died of SIGKILL"),
    ):
        yield Cell(victim, "killed", "startup", End.FAILS, told, replaces=True, times=times)
    for victim in ("generator", "trainer"):
        lost = f"the {victim} left early, killed by SIGKILL"
        yield Cell(victim, "killed", "step", End.FAILS, lost, replaces=True, times=4)
    late = "the trainer did not answer a request to stop within 3 s"
    grace = ("--shutdown.grace_s", "15")
    yield Cell(
        "trainer", "hangs", "last save", End.FAILS, late, place="trainer save", is_asked_to_end=True, settings=grace
    )


def _of_resources() -> Iterator[Cell]:
    """What a run stands on."""
    untold = "the summary could not be written"
    yield from (
        Cell("disk", "full", "startup", End.REFUSED, "cannot write", times=0, within=Within.FULL_DISK),
        Cell("disk", "fill_disk", "step", End.UNWRITTEN, "cannot append to the event log"),
        Cell("disk", "fill_real_disk", "step", End.UNWRITTEN, "No space left on device", within=Within.SMALL_DISK),
        Cell("disk", "fill_disk_of_role", "save", End.FAILS, "File too large"),
        Cell("disk", "fill_disk", "shutdown", End.UNWRITTEN, untold, place="trainer end"),
        Cell("folder", "forbidden", "startup", End.REFUSED, "cannot write", times=0, within=Within.FORBIDDEN_FOLDER),
        Cell("folder", "forbid_checkpoints", "save", End.FAILS, "Permission denied", within=Within.PERMISSIONS),
        Cell("folder", "forbid_run_folder", "shutdown", End.UNWRITTEN, untold, within=Within.PERMISSIONS),
        Cell("memory", "none", "startup", End.REFUSED, "has no room", times=0, within=Within.NO_MEMORY),
        Cell("memory", "fill_shared_memory", "step", End.EITHER, "has no room", within=Within.SMALL_MEMORY),
        Cell("memory", "fill_shared_memory", "shutdown", within=Within.SMALL_MEMORY),
        Cell("sockets", "delete_sockets", "startup", End.REFUSED, "socket", place="trainer startup"),
        Cell("sockets", "delete_sockets", "step"),
        Cell("sockets", "delete_sockets", "shutdown"),
        Cell("segments", "truncate_segments", "step", End.EITHER, "batch-"),
        Cell("segments", "overwrite_segments", "step", End.EITHER, "batch-"),
        Cell("segments", "truncate_segments_and_kill", "step", End.FAILS, "batch-"),
        Cell("segments", "overwrite_segments_and_kill", "step", End.FAILS, "batch-"),
        Cell("segments", "truncate_segments", "shutdown"),
        Cell("segments", "overwrite_segments", "shutdown"),
    )


# --- one of them ------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, parent: Path) -> Outcome:
    """The run and its fault, in this folder; what is as specified, and what not."""
    outcome = Outcome(cell.name)
    fault = cell.fault(parent / "fault")
    fault.folder.mkdir(parents=True)
    if cell.within is Within.FORBIDDEN_FOLDER:
        (parent / "runs").mkdir(mode=0o555)
    within, begun_s = cell.within.command() or (), time.monotonic()
    started = command(parent, *cell.overrides, variables=fault.variables, within=within)
    with started as run, Striker(fault) as striker:
        try:
            _see_it_struck(cell, run, striker)
            status, printed = run.wait()
            _wait_for_processes(fault, outcome)
            outcome.exit_s = time.monotonic() - max([begun_s, *striker.struck_s])
            if not cell.may_end_alone:
                outcome.leaks += [f"left behind: {path}" for path in run.leftovers()]
            _check_end(cell, run, status, printed, outcome)
        except (subprocess.TimeoutExpired, AssertionError, TailraceError, OSError) as error:
            outcome.wrong.append(f"{type(error).__name__}: {error}")
    for folder in (run.folder.parent, run.folder, run.folder / "checkpoints"):
        with suppress(FileNotFoundError):
            folder.chmod(0o755)
    if outcome.wrong:
        _end_processes(fault)
    elif cell.end is End.ORPHANED:
        _check_resumed(cell, parent, outcome)
        outcome.leaks += [f"left behind: {path}" for path in run.leftovers()]
    return outcome


def _see_it_struck(cell: Cell, run: Command, striker: Striker) -> None:
    """Wait for the last blow, and do what has to follow it."""
    run.wait_until(lambda: len(striker.struck_s) == cell.times or run.process.poll() is not None)
    if cell.is_asked_to_end:
        striker.struck_s.append(time.monotonic())
        run.process.terminate()
        while cell.end is End.ORPHANED and run.process.poll() is None:  # which hears the second one
            time.sleep(NOTICED_S)
            run.process.terminate()
    if (cell.victim, cell.blow) == ("orchestrator", "stopped"):  # the others wait for it, until somebody ends it
        time.sleep(NOTICED_S)
        striker.struck_s.append(time.monotonic())
        run.process.kill()


def _check_end(cell: Cell, run: Command, status: int, printed: str, outcome: Outcome) -> None:
    if run.folder.is_dir() and _stays_locked(run.folder):
        outcome.leaks.append(f"{run.folder} is locked")
    match cell.end:
        case End.ORPHANED:
            _check_nothing_told(run, "", "", outcome)
            return
        case End.REFUSED | End.UNWRITTEN:
            if status not in (1, 2) or (cell.end is End.REFUSED and records(run.folder / "metrics.jsonl")):
                outcome.wrong.append(f"ended with status {status}: {printed}")
            _check_nothing_told(run, printed, cell.says, outcome)
            return
        case End.FINISHES:
            _check_finished(cell, run, status, printed, outcome)
        case End.EITHER if status == 0:
            _check_finished(cell, run, status, printed, outcome)
        case End.FAILS | End.EITHER:
            _check_failed(cell, run, status, printed, outcome)
    log = (run.folder / "logs" / "orchestrator.log").read_text()
    if cell.replaces is not None and bool(re.search(_REPLACED, log)) != cell.replaces:
        outcome.wrong.append(f"replaces it: {not cell.replaces}; {printed}")
    _check_folder(run.folder, outcome)


def _check_nothing_told(run: Command, printed: str, says: str, outcome: Outcome) -> None:
    """What cannot be written is printed; no summary says that all went well."""
    if (summary := read_summary(run.folder)) is not None and summary.status is RunStatus.FINISHED:
        outcome.wrong.append("there is a summary that says finished")
    if not re.search(says, printed):
        outcome.wrong.append(f"printed nothing of {says!r}: {printed}")


def _check_failed(cell: Cell, run: Command, status: int, printed: str, outcome: Outcome) -> None:
    summary = _summary(run.folder)
    if (status, summary.status) != (1, RunStatus.FAILED) or not re.search(cell.says, summary.reason, re.DOTALL):
        outcome.wrong.append(f"ended with status {status}, {summary.status}: {summary.reason}\n{printed}")
    if "damaged bytes" in summary.reason:
        outcome.wrong.append(f"the trainer was given damaged bytes: {summary.reason}")


def _summary(folder: Path) -> RunSummary:
    if (summary := read_summary(folder)) is None:
        raise DataError(f"{folder} has no summary")
    return summary


def _check_finished(cell: Cell, run: Command, status: int, printed: str, outcome: Outcome) -> None:
    """Every step is told once, and no attempt at a rollout failed but those that a worker held."""
    summary = _summary(run.folder)
    if (status, summary.status, summary.steps) != (0, RunStatus.FINISHED, STEPS):
        outcome.wrong.append(f"ended with status {status}, {summary.status}: {summary.reason}\n{printed}")
    told = [line["step"] for line in records(run.folder / "metrics.jsonl")]
    missing = sorted({*range(1, STEPS + 1)} - {*told})
    if told != sorted({*told}) or missing[_UNTOLD if cell.end is End.ORPHANED else 0 :]:
        outcome.wrong.append(f"told of steps {told}")
    costs = {"worker_lost", "environment_failed"} if cell.victim == "worker" else set()
    if summary.ledger.by_reason.get("failed", {}).keys() - costs:
        outcome.wrong.append(f"rollouts failed: {summary.ledger.by_reason}")


def _check_folder(folder: Path, outcome: Outcome) -> None:
    """The newest checkpoint loads, the ledger balances."""
    summary = _summary(folder)
    if not summary.ledger.balances:
        outcome.wrong.append(f"the ledger does not balance: {summary.ledger.invariant_line()}")
    newest = max((folder / "checkpoints").glob("step_*"), default=None)
    if newest is not None:
        load_checkpoint(newest)


def _check_resumed(cell: Cell, parent: Path, outcome: Outcome) -> None:
    """It goes on to its end; what never took a step begins anew under its name."""
    resume = () if cell.moment == "startup" else ("--resume",)
    with command(parent, *cell.overrides, *resume) as run:
        status, printed = run.wait()
    _check_finished(cell, run, status, printed, outcome)
    _check_folder(run.folder, outcome)


# --- what is left -----------------------------------------------------------------------------------------------------


def _processes(fault: Fault) -> list[psutil.Process]:
    """All that were started for this cell, wherever they belong now."""
    mark, found = f"{FAULT}={fault.folder}|".encode(), []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
    return found


def _wait_for_processes(fault: Fault, outcome: Outcome) -> None:
    left = _processes(fault)
    still_run(left, 2 * LIMIT_S)
    for process in _end_processes(fault):
        outcome.leaks.append(f"still runs: {process}")


def _end_processes(fault: Fault) -> list[psutil.Process]:
    """Those that are left."""
    left = _processes(fault)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    still_run(left, PATIENCE_S)
    return left


def _stays_locked(folder: Path) -> bool:
    """Beyond the moment in which a process ends."""
    deadline_s = time.monotonic() + _ENDS_S
    while _is_locked(folder):
        if time.monotonic() > deadline_s:
            return True
        time.sleep(NOTICED_S)
    return False


def _is_locked(folder: Path) -> bool:
    """By a process that is left."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(held)
