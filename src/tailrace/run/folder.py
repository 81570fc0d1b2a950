"""A run's folder: made once, never overwritten, and one run's at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from tailrace.config import (
    CONFIG_FILE,
    MODULES_FILE,
    RECIPE_FILE,
    Difference,
    RunSettings,
    SettingsFile,
    differences,
    module_folders,
    own_settings,
    settings_as_toml,
)
from tailrace.errors import DataError, SettingsError
from tailrace.guards import decoded
from tailrace.output_files import part_of, replace_durably, replacing_durably
from tailrace.reporting.sinks import append_lines, step_of_path
from tailrace.reporting.tokens.files import files_in
from tailrace.run.notices import NOTICE
from tailrace.run.ownership import OWNER_FILE, Ownership, own_folder
from tailrace.transport.owned_folders import remove_leftovers
from tailrace.transport.redis.feed_place import FEED_FILE


class RunPaths:
    """Where a run's files are. See "A run's folder" in docs/concepts.md."""

    def __init__(self, root: Path, owned: Ownership | None = None) -> None:
        self.root = root
        self.owned = owned
        """None where it is not this process's own."""
        self.settings = root / CONFIG_FILE
        self.recipe = root / RECIPE_FILE
        self.modules = root / MODULES_FILE
        self.events = root / "events.jsonl"
        self.metrics = root / "metrics.jsonl"
        self.rollouts = root / "rollouts"
        self.superseded = root / "superseded"
        """What was written about steps that a resumed run trained again, and settings that it went on without."""
        self.checkpoints = root / "checkpoints"
        self.scheduler = root / "scheduler"
        """The scheduler's state at the steps that checkpoints name."""
        self.batches = root / "batches"
        """Batches on their way that go by files, or have no room in shared memory; gone when the run has ended."""
        self.logs = root / "logs"
        self.trace = root / "trace.json"
        """A Chrome trace of all processes, written when the run ends."""
        self.trace_parts = root / "trace"
        """What each process has written of it so far."""
        self.capture = root / "capture"
        """What entered the pipeline in the first steps, where asked for."""
        self.tokens = root / "tokens"
        """Rollouts token by token, and every token that was trained on, where asked for."""
        self.join = root / "join.json"
        """Where generators ask to join the run, while it takes any in."""
        self.gateway = root / "gateway.json"
        """Where clients outside find the run, and its key; gone when the run has ended."""
        self.feed = root / FEED_FILE
        """Where a trainer outside finds the run's samples; gone when the run has ended."""
        self.nonfinite = root / "nonfinite"
        """The rows of steps that were skipped since their loss or gradient was not finite."""
        self.tokenizer = root / "tokenizer"
        """The tokenizer's files, where the model has no local folder."""

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step lies, if there is one."""
        return self.checkpoints / f"step_{step:06d}"

    def newest_checkpoint(self) -> str:
        """The newest one that is there, by its name; empty where there is none."""
        steps = [step for path in self.checkpoints.glob("step_*") if (step := step_of_path(path)) is not None]
        return str(self.checkpoint(max(steps))) if steps else ""

    def checkpoint_seen_here(self, path: str) -> str:
        """One that the trainer tells of, which may see the run's folder under a path of its own machine.

        >>> RunPaths(Path("runs/mine")).checkpoint_seen_here("/mnt/runs/mine/checkpoints/step_000010")
        'runs/mine/checkpoints/step_000010'
        """
        named = Path(path)
        is_ours = (named.parent.name, named.parent.parent.name) == (self.checkpoints.name, self.root.name)
        return str(self.checkpoints / named.name) if is_ours else path


_logger = logging.getLogger(__name__)

_NOT_IN_ORDER = (
    "the start before this one (%s) did not end in order: it was killed, stopped at once, or lost its machine"
)
_STARTED = re.compile(rb'\{"type":"TrainerStarted","epoch":"([^"]+)"')
"""How the event of each start of the trainer begins; the run's has one epoch."""
_STARTED_OR_SAVED = re.compile(rb'\{"type":"(TrainerStarted|CheckpointWritten)","epoch":"[^"]+","step":(\d+),')


_REFUSED = """\
{paths.root} has other settings than are given now:
{changes}
add --allow-changed-settings to go on with those given now (the others are kept in {paths.superseded}), or resume with \
{paths.settings} in place of the recipe to go on as before"""


_OF_CHECKPOINTS = ("trainer.lora.", "trainer.optimizer")
"""Beginnings of settings that a checkpoint was written with, and can be read with alone."""


class _MetricsLine(msgspec.Struct):
    step: int = 0


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise `DataError` where what is done within cannot write the run's folder."""
    try:
        yield
    except OSError as error:
        what = f" ({error.filename})" if error.filename else ""
        raise DataError(f"cannot write the run folder {folder}: {error.strerror}{what}") from error


@contextlib.contextmanager
def announcement_file(path: Path, content: bytes) -> Iterator[None]:
    """A file for this user alone, for as long as what it tells of is there."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content + b"\n")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_run_folder(settings: RunSettings, parent: Path) -> Iterator[RunPaths]:
    """The run's folder, with nobody else in it while in here. Without `resume` it is new, with it a run is there.

    What a run left that ended before its first step is set aside.

    Raises `DataError` where that is not so, or it cannot be written.
    """
    paths = RunPaths(parent / settings.name)
    if settings.resume and not paths.root.is_dir():  # to own a folder makes it
        raise _nothing_to_resume(paths)
    with own_folder(paths.root) as owned:
        if owned.before is not None:  # at once: after a start that is refused nobody knows any more
            _logger.warning(_NOT_IN_ORDER, owned.before)
        is_there = _holds_something(paths.root)
        if settings.resume and not is_there:
            raise _nothing_to_resume(paths)
        if is_there and not settings.resume and _is_before_first_step(paths):
            _set_aside(paths)
        elif is_there and not settings.resume:
            raise DataError(
                f"the run folder {paths.root} exists already, and nothing in it will be overwritten: choose another "
                "--name, or add --resume to go on from its newest checkpoint"
            )
        yield RunPaths(paths.root, owned)


def _is_before_first_step(paths: RunPaths) -> bool:
    """Whether the folder is that of a run which ended before it had trained at all: its name may be used again."""
    has_begun = paths.events.is_file() or paths.settings.is_file()
    if not has_begun and not _left_by_starts(paths).issuperset(paths.root.iterdir()):
        return False  # whatever it is, no run made it
    has_trained = any(path != paths.checkpoint(0) for path in paths.checkpoints.glob("step_*"))
    if has_trained or (paths.superseded / paths.metrics.name).exists():
        return False
    return not any(map(_step_of, _lines(paths.metrics)))


def _left_by_starts(paths: RunPaths) -> set[Path]:
    """What may be in the folder once a start was refused before its settings were written."""
    parts = map(part_of, (paths.settings, paths.recipe))
    return {*_of_any_start(paths), paths.tokenizer, *parts}


def _of_any_start(paths: RunPaths) -> set[Path]:
    """What is not of the run that left the folder: whether a notice is for the next one shows its time."""
    return {paths.root / OWNER_FILE, paths.root / NOTICE, paths.superseded}


def _set_aside(paths: RunPaths) -> None:
    """Move what such a run left to `superseded/`. What was on its way between its processes, and lies here where a kill
    left it, is of no use to anybody. Raises `DataError`.
    """
    remove_leftovers(paths.root)
    shutil.rmtree(paths.batches, ignore_errors=True)
    left = [path for path in paths.root.iterdir() if path not in _of_any_start(paths)]
    if not left:
        return
    number = len([*paths.superseded.glob("start_*")]) + 1
    aside = paths.superseded / f"start_{number}"
    with writing(paths.root):
        aside.mkdir(parents=True)
        for path in left:
            path.rename(aside / path.name)
    _logger.info("the run of before ended before its first step; what it left is in %s", aside)


def require_resumable(settings: RunSettings, parent: Path) -> None:
    """Refuse a resume as the run would, by its folder alone, which is only read.

    Raises `DataError` where there is nothing to resume, `SettingsError` for other settings than the run has, and
    `CheckpointError` where its newest checkpoint is damaged.
    """
    paths = RunPaths(parent / settings.name)
    if not _holds_something(paths.root):
        raise _nothing_to_resume(paths)
    _allowed_changes(own_settings(paths.root), settings, paths)


def _nothing_to_resume(paths: RunPaths) -> DataError:
    return DataError(f"there is nothing to resume in {paths.root}: leave --resume out to start a new run")


def _holds_something(folder: Path) -> bool:
    return folder.is_dir() and any(path.name != OWNER_FILE for path in folder.iterdir())


def record_settings(settings: RunSettings, paths: RunPaths, recipe: SettingsFile | None) -> list[Difference]:
    """Write the resolved settings into the folder, and the recipe that they were made of, where there is one that is
    not the folder's own file.

    Where a run goes on with settings that change what it learns, those before are kept in `superseded/`, and the
    differences returned. Raises `SettingsError` where that is not allowed or no file can hold them, `CheckpointError`
    where the newest checkpoint is damaged, and `DataError` where the folder cannot be written.
    """
    before = own_settings(paths.root)
    changed = _allowed_changes(before, settings, paths)
    resolved = settings_as_toml(settings)
    with writing(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        if changed:
            _keep(paths.settings, paths.superseded)
        if before is None or differences(before, settings, of_places=True):
            replace_durably(paths.settings, resolved.encode())
        if recipe is not None and not recipe.is_at(paths.settings):
            replace_durably(paths.recipe, tomli_w.dumps(_without_none(recipe.table)).encode())
            replace_durably(paths.modules, os.fsencode(module_folders(Path(recipe.path))[-1]))
    return changed


def _allowed_changes(before: RunSettings | None, settings: RunSettings, paths: RunPaths) -> list[Difference]:
    """From the settings that the folder's run has, if there is one.

    Raises `SettingsError` where it may have none, or where its newest checkpoint is of another adapter or optimizer,
    and `CheckpointError` for a damaged one.
    """
    changed = [] if before is None else differences(before, settings)
    if changed and not settings.allow_changed_settings:
        raise SettingsError(_REFUSED.format(paths=paths, changes="\n".join(f"  {one}" for one in changed)))
    if any(one.name.startswith(_OF_CHECKPOINTS) for one in changed):
        from tailrace.run.checkpoint_checks import require_own_checkpoint  # imports torch

        require_own_checkpoint(settings, paths.checkpoints)
    return changed


def _keep(file: Path, folder: Path) -> None:
    """Copy a file there, as the next one of its name: `config_1.toml`."""
    folder.mkdir(exist_ok=True)
    number = len([*folder.glob(f"{file.stem}_*{file.suffix}")]) + 1
    shutil.copy2(file, folder / f"{file.stem}_{number}{file.suffix}")


def _without_none(value: Any) -> Any:
    """TOML has no null: what is unset is left out."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_none(one) for one in value if one is not None]
    return value


def wind_back(paths: RunPaths, step: int) -> None:
    """Move what was written about steps after `step`, which will be trained again, to `superseded/`.

    Then metrics and rollouts are one history, that of the weights in use. Raises `DataError`.
    """
    rollouts = [path for path in paths.rollouts.glob("*_*.jsonl") if (number := step_of_path(path)) and number > step]
    try:
        _wind_metrics_back(paths, step)
        for path in rollouts:
            append_lines(paths.superseded / path.name, [path.read_bytes()])
            path.unlink()
        for found in files_in(paths.tokens):
            if found.moment.step > step:
                (paths.superseded / paths.tokens.name).mkdir(parents=True, exist_ok=True)
                found.path.replace(paths.superseded / paths.tokens.name / found.path.name)
    except OSError as error:
        raise DataError(f"cannot set aside the steps after {step} in {paths.root}: {error.strerror}") from error


def _wind_metrics_back(paths: RunPaths, step: int) -> None:
    """Line by line: those of a long run come to gigabytes. What a full disk cut short is left out. Raises `OSError`."""
    steps = [_step_of(line) for line in _lines(paths.metrics)]
    goes = [one is not None and one > step for one in steps]
    stays = [one is not None and one <= step for one in steps]
    if all(stays):
        return
    if any(goes):
        append_lines(paths.superseded / paths.metrics.name, compress(_lines(paths.metrics), goes))
    with replacing_durably(paths.metrics) as file:
        file.writelines(compress(_lines(paths.metrics), stays))


def count_starts(paths: RunPaths) -> int:
    """How often the run was started and its trainer came up, so far; once, however often that was started again."""
    return len({found.group(1) for line in _lines(paths.events) if (found := _STARTED.match(line))})


def saved_step(paths: RunPaths) -> int:
    """Of the newest checkpoint that the trainer told of, but for steps that it went back behind; 0 without any."""
    saved = [0]
    for found in map(_STARTED_OR_SAVED.match, _lines(paths.events)):
        if found is not None and found.group(1) == b"CheckpointWritten":
            saved.append(int(found.group(2)))
        elif found is not None:
            saved = [step for step in saved if step <= int(found.group(2))]
    return max(saved)


def _lines(path: Path) -> Iterator[bytes]:
    """With their ends; none without the file."""
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def _step_of(line: bytes) -> int | None:
    """None for a line that was cut short."""
    return decoded(lambda: msgspec.json.decode(line, type=_MetricsLine).step)
