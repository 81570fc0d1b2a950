"""A run's folder: made once, never overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from tailrace.config import RunSettings
from tailrace.errors import DataError


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where a run's files are. See "A run's folder" in docs/concepts.md."""

    root: Path

    @property
    def settings(self) -> Path:
        """The resolved settings."""
        return self.root / "config.toml"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line of metrics per step."""
        return self.root / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One file of readable rollouts per step."""
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.root / "logs"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's files, where the model's own folder is not a local one."""
        return self.root / "tokenizer"


def open_run_folder(settings: RunSettings, parent: Path) -> RunPaths:
    """Make the run's folder, or find it again to resume.

    Raises `DataError` when it exists and `resume` is off (nothing is ever overwritten), when there is nothing to
    resume, and when the folder cannot be made.
    """
    paths = RunPaths(parent / settings.name)
    exists = paths.root.is_dir() and any(paths.root.iterdir())
    if exists and not settings.resume:
        raise DataError(
            f"the run folder {paths.root} exists already, and nothing in it will be overwritten: choose another "
            "--name, or add --resume to go on from its newest checkpoint"
        )
    if settings.resume and not exists:
        raise DataError(f"there is nothing to resume in {paths.root}: leave --resume out to start a new run")
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.settings.write_text(settings_as_toml(settings), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the run folder {paths.root}: {error.strerror}") from error
    return paths


def settings_as_toml(settings: RunSettings) -> str:
    """The resolved settings as a file that `tailrace train` takes. What is unset is left out: TOML has no null."""
    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))
