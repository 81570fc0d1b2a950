"""Which run folders there are, and how each stands: from small files and the ends of large ones."""

from __future__ import annotations

import enum
import os
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import psutil

from tailrace.dashboard.names import as_text
from tailrace.dashboard.others import about
from tailrace.dashboard.settings_view import Settings, read_settings
from tailrace.dashboard.tailing import first_lines, lines_backwards, stamp_of
from tailrace.errors import DataError
from tailrace.records import Json
from tailrace.reporting.run_folder import METRICS_FILE, is_number
from tailrace.reporting.sinks import decode_object
from tailrace.reporting.summary import RunSummary, read_summary

_MARKS = ("config.toml", METRICS_FILE, "events.jsonl", "summary.json")
"""A folder with one of these is a run's, whose row is read from them."""
_OWNER_FILE = "owner.json"
_OWNER_LAPSES_S = 120.0
"""An owner renews the time stamp of its file every 20 s."""
_NEAR_BYTES = 1 << 18
_FAR_BYTES = 1 << 23
"""Of the metrics, from their end on: some hundred steps, and one of tens of thousands of generators."""
_MOST_RUNS = 2_000


class RunState(enum.StrEnum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    """It ended without saying so."""
    READ = "read"
    """Made of another library's files, which do not say."""

    @property
    def is_told(self) -> bool:
        """The run's summary says so: else it has none, or one of an earlier start."""
        return self in (RunState.FINISHED, RunState.FAILED, RunState.CANCELLED)


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the table of all."""

    id: str
    """The folder's name."""
    name: str
    state: RunState
    reason: str = ""
    steps: int = 0
    max_steps: int | None = None
    wall_s: float | None = None
    reward: float | None = None
    """Mean of the newest step."""
    reward_first: float | None = None
    held_out: float | None = None
    """Mean of the newest evaluation, of the first environment that has one."""
    model: str = ""
    environments: list[str] = []
    tags: list[str] = []
    changed_s: float = 0.0
    """Seconds since 1970."""
    family: str = ""
    """The same for runs whose settings differ in their seeds alone, and in how and where they were started."""
    differing: dict[str, msgspec.Raw] = {}
    """Settings that are not the same in all runs of the table, as JSON."""


class _Owner(msgspec.Struct):
    pid: int = 0
    host: str = ""


def is_run_folder(folder: Path) -> bool:
    """Whether a run has begun in it."""
    return any((folder / mark).is_file() for mark in _MARKS)


def find_runs(root: Path) -> dict[str, Path]:
    """Run folders by their names: `root` itself where it is one, else those in it. At most 2,000, newest first."""
    if is_run_folder(root):
        return {as_text(root.resolve().name): root}
    try:
        with os.scandir(root) as entries:
            folders = [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return {}
    found = [folder for folder in folders if is_run_folder(folder)]
    found.sort(key=_changed_s, reverse=True)
    return {as_text(folder.name): folder for folder in found[:_MOST_RUNS]}


def _changed_s(folder: Path) -> float:
    """When its metrics changed last, or else the folder itself."""
    for path in (folder / METRICS_FILE, folder / "events.jsonl", folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


class RunTable:
    """Rows of all runs. What has not changed since is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, RunRow, Settings]] = {}

    def rows(self, runs: dict[str, Path]) -> list[RunRow]:
        """One for each run, in the same order."""
        found = [self._row(name, folder) for name, folder in runs.items()]
        self._known = {folder: self._known[folder] for folder in runs.values()}
        varying = _varying([settings for row, settings in found if row.state is not RunState.READ])
        return [
            msgspec.structs.replace(
                row,
                differing={
                    key: msgspec.Raw(msgspec.json.encode(settings.shown[key]))
                    for key in varying
                    if key in settings.shown
                },
            )
            for row, settings in found
        ]

    def _row(self, name: str, folder: Path) -> tuple[RunRow, Settings]:
        alive = _owner_is_alive(folder)
        state = (*(stamp_of(folder / file) for file in _MARKS), alive)
        known = self._known.get(folder)
        if known is None or known[0] != state:
            row, settings = _read_row(name, folder, alive=alive)
            self._known[folder] = known = (state, row, settings)
        return known[1], known[2]


def _varying(settings: list[Settings]) -> list[str]:
    """Names of settings that two of these have otherwise, or that one of them lacks."""
    values: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for one in settings:
        for key, value in one.flat.items():
            values.setdefault(key, set()).add(repr(value))
            counts[key] = counts.get(key, 0) + 1
    return [
        key
        for key, found in values.items()
        if (len(found) > 1 or counts[key] < len(settings)) and key not in ("name", "observability.tags")
    ]


def _read_row(name: str, folder: Path, *, alive: bool) -> tuple[RunRow, Settings]:
    """What the table shows of one run. Never raises: what cannot be read is left out."""
    settings = read_settings(folder / "config.toml")
    summary = summary_of(folder)
    state = RunState.READ if about(folder) else _state(summary, alive, (folder / _OWNER_FILE).exists())
    metrics = folder / METRICS_FILE
    first = _line_with(("reward/mean",), first_lines(metrics, _NEAR_BYTES))
    newest = _line_with(("reward/mean", "policy/version"), lines_backwards(metrics, _FAR_BYTES))
    return (
        RunRow(
            id=name,
            name=settings.text("name") or (summary.name if summary else name),
            state=state,
            reason=summary.reason if summary is not None and state.is_told else "",
            steps=int(_number(newest.get("step")) or (summary.steps if summary else 0)),
            max_steps=settings.integer("max_steps"),
            wall_s=_number(newest.get("wall_s")),
            reward=_number(newest.get("reward/mean")),
            reward_first=_number(first.get("reward/mean")),
            held_out=_held_out(metrics, settings),
            model=settings.text("model.name"),
            environments=settings.environments,
            tags=settings.tags,
            changed_s=_changed_s(folder),
            family=settings.family,
        ),
        settings,
    )


def summary_of(folder: Path) -> RunSummary | None:
    """None where the run wrote none, or one that cannot be read."""
    try:
        return read_summary(folder)
    except (DataError, OSError):
        return None


def _state(summary: RunSummary | None, alive: bool, left_behind: bool) -> RunState:
    """An owner that is gone takes its file along, unless it was killed."""
    if alive:
        return RunState.RUNNING
    return RunState.CRASHED if summary is None or left_behind else RunState(str(summary.status))


def _owner_is_alive(folder: Path) -> bool:
    """Whether a run goes on in the folder, without touching its lock.

    One that lives renewed its file lately; on this host its process is there besides, whose number another may have.
    """
    path = folder / _OWNER_FILE
    try:
        owner = msgspec.json.decode(path.read_bytes()[:4096], type=_Owner)
        silent_s = time.time() - path.stat().st_mtime
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    is_here = owner.host == socket.gethostname()
    return abs(silent_s) < _OWNER_LAPSES_S and (not is_here or _process_is_alive(owner.pid))


def _process_is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return pid > 0 and psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _line_with(names: Collection[str], lines: Iterable[bytes]) -> dict[str, Json]:
    """The first of these lines of metrics that has one of the names; empty where none has."""
    found = (line for line in map(decode_object, lines) if line is not None)
    return next((line for line in found if any(name in line for name in names)), {})


def _held_out(metrics: Path, settings: Settings) -> float | None:
    """That of the newest evaluation; without a setting for more nobody pays for looking far back."""
    num_bytes = _FAR_BYTES if settings.integer("evaluation.every_steps") else _NEAR_BYTES
    for line in lines_backwards(metrics, num_bytes):
        for name, value in ((decode_object(line) or {}) if b'"eval/' in line else {}).items():
            if name.startswith("eval/") and name.endswith("/reward/mean"):
                return _number(value)
    return None


def _number(value: Json) -> float | None:
    return float(value) if is_number(value) else None
