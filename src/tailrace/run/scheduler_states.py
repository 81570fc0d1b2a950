"""The scheduler's state at each step, so that a run resumed from a checkpoint goes on with the very next tasks.

    scheduler/step_000012.json    the orchestrator writes it before it sends the batch of step 12
    checkpoints/step_000012/      the trainer writes it once that batch is trained; its step names the state. While it
                                  does, steps go on, and the folder is called .writing_step_000012

A state is durable before the trainer can have its step, so every checkpoint finds its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tailrace.errors import CheckpointError
from tailrace.output_files import replace_durably

_STEP = re.compile(r"^step_(\d{6,})$")
_BEING_WRITTEN = ".writing_"
"""What the name of a checkpoint begins with until it is whole (`training.checkpoints`)."""


class SchedulerStates:
    """States by step, in a folder beside the checkpoints that name them. `write` and `read` touch a disk."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self._folder, self._checkpoints = folder, checkpoints
        self._ended_step = 0
        self._states: set[int] | None = None
        """Steps of which one is there, once that was looked up: a run without checkpoints keeps thousands."""

    def path(self, step: int) -> Path:
        """The file of one step."""
        return self._folder / f"step_{step:06d}.json"

    def step_ended(self, step: int) -> None:
        """The trainer has ended this step: no checkpoint of an earlier one will be begun."""
        self._ended_step = step

    def write(self, step: int, state: bytes) -> None:
        """Write the state of `step` durably, and delete those that no checkpoint can name. Raises `CheckpointError`."""
        path = self.path(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_durably(path, state)
            self._prune(self._ended_step, step)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path} ({error.strerror}), without which no checkpoint of step {step} can be resumed: "
                "free some space, then --resume"
            ) from error

    def read(self, step: int) -> bytes:
        """What was written at `step`; empty at step 0, where every run begins. Raises `CheckpointError`."""
        if step == 0:
            return b""
        try:
            return self.path(step).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be resumed without {self.path(step)} ({error.strerror}): "
                "put it back where the checkpoint was copied from"
            ) from error

    def read_newest(self, step: int) -> bytes:
        """That of `step`, or of the newest step before that was told of: an outside trainer may have gone further than
        it told. Where there is none yet, or an empty one alone, since nothing was trained after it, tasks begin after
        `step`, of which an empty one is kept.

        Raises `CheckpointError`, where all are of later steps as well: tasks would begin anew.
        """
        if step == 0:
            return b""
        kept = {*_steps(self._folder, suffix=".json")}
        if not kept or (len(kept) == 1 and step < (only := max(kept)) and not self.read(only)):
            self.write(step, b"")
            return b""
        if step < min(kept):
            raise CheckpointError(
                f"the trainer goes on after step {step}, and the oldest state in {self._folder} is of step "
                f"{min(kept)}: let it go on from a checkpoint of that step, or of a later one"
            )
        return self.read(max(one for one in kept if one <= step))

    def _prune(self, first: int, last: int) -> None:
        """Keep the states of `first` to `last` and those of checkpoints; later ones are of a run that was resumed."""
        if self._states is None:
            self._states = {*_steps(self._folder, suffix=".json")}
        self._states.add(last)
        if not (past := {step for step in self._states if not first <= step <= last}):
            return
        for _ in range(2):  # one that is renamed meanwhile may be in neither place for one listing
            past.difference_update(_steps(self._checkpoints, prefix=_BEING_WRITTEN))
        for step in past:
            self.path(step).unlink(missing_ok=True)
        self._states -= past


def _steps(folder: Path, *, prefix: str = "", suffix: str = "") -> Iterator[int]:
    """Steps that files or folders with this suffix are of, with that prefix or without."""
    names = os.listdir(folder) if folder.is_dir() else []
    for name in names:
        if name.endswith(suffix) and (match := _STEP.match(name.removesuffix(suffix).removeprefix(prefix))):
            yield int(match.group(1))
