"""The files of `tokens/`: their names, and which of them go when there are too many."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tailrace.training.settings.trainer import BESIDE_ROLLOUTS

TOKENS_FOLDER = "tokens"
_NAME = re.compile(r"(step|evaluation)_(\d{1,15})(_rank_\d{1,6})?\.(parquet|jsonl)(\.part)?")


class Moment(NamedTuple):
    """When rollouts ended: with a step, or with an evaluation due at it."""

    step: int
    is_evaluation: bool = False

    @property
    def file_name(self) -> str:
        """Of its rollouts' tokens.

        >>> Moment(12).file_name, Moment(40, is_evaluation=True).file_name
        ('step_000012.parquet', 'evaluation_000040.parquet')
        """
        return f"{'evaluation' if self.is_evaluation else 'step'}_{self.step:06d}.parquet"


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file of rollouts, token by token."""

    path: Path
    step: int
    is_evaluation: bool
    num_bytes: int


class FoundFile(NamedTuple):
    """What the name of a file in the folder says."""

    path: Path
    moment: Moment
    is_export: bool
    """A rank of the trainer wrote it."""
    is_part: bool
    """It was not whole when it was looked at."""
    num_bytes: int
    modified_ns: int


def token_files(run_folder: Path) -> list[TokenFile]:
    """Those of a run, by step, an evaluation after the step that it was due at. Files that are being written, or were
    when a run ended, are left out. Reads the folder alone."""
    found = [one for one in files_in(run_folder / TOKENS_FOLDER) if not one.is_export and not one.is_part]
    return [TokenFile(one.path, *one.moment, one.num_bytes) for one in sorted(found, key=lambda one: one.moment)]


def exported_steps(run_folder: Path) -> list[int]:
    """Those that the trainer exported, in order."""
    found = files_in(run_folder / TOKENS_FOLDER)
    return sorted({one.moment.step for one in found if one.is_export and not one.is_part})


def exported_files(run_folder: Path, step: int) -> list[Path]:
    """What the trainer's ranks exported of a step; in Parquet where there are two forms of it."""
    paths = [one.path for one in files_of(run_folder, Moment(step)) if one.is_export]
    return [path for path in paths if path.suffix == ".parquet" or path.with_suffix(".parquet") not in paths]


def files_of(run_folder: Path, moment: Moment) -> tuple[FoundFile, ...]:
    """What is whole of a moment, exports too, by name: equal for as long as the same is to be read."""
    found = files_in(run_folder / TOKENS_FOLDER)
    return tuple(sorted(one for one in found if one.moment == moment and not one.is_part))


def files_in(folder: Path) -> list[FoundFile]:
    """Those whose names are of the folder's kinds; none without the folder. A file that goes meanwhile is none."""
    if not folder.is_dir():
        return []
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            with suppress(FileNotFoundError):
                if name is not None:
                    moment, about = Moment(int(name[2]), name[1] == "evaluation"), entry.stat()
                    is_export, is_part = bool(name[3]), bool(name[5])
                    found.append(
                        FoundFile(Path(entry.path), moment, is_export, is_part, about.st_size, about.st_mtime_ns)
                    )
    return found


def is_beside_rollouts(export: Path) -> bool:
    """Whether an export goes with its step's rollouts: it was not asked for by itself, and says so. Reads its end.

    One that cannot be read, or is of a version that did not say it, may have been asked for.
    """
    if export.suffix != ".parquet":
        return False
    from pyarrow import ArrowException, parquet

    try:
        return BESIDE_ROLLOUTS in (parquet.read_metadata(export).metadata or {})
    except (OSError, ArrowException):
        return False


def surplus(sizes: Mapping[Moment, int], max_bytes: int) -> list[Moment]:
    """Which moments' files to delete, so that the rest is of `max_bytes` at most and spans the run evenly.

    Again and again the one goes whose neighbours are closest in steps; the first and the newest stay longest, and the
    newest always.

    >>> surplus({Moment(step): 10 for step in (10, 20, 30, 40, 50)}, 30)
    [Moment(step=20, is_evaluation=False), Moment(step=40, is_evaluation=False)]
    """
    kept, total, gone = sorted(sizes), sum(sizes.values()), []
    while total > max_bytes and len(kept) > 1:
        inner = range(1, len(kept) - 1)
        place = min(inner, key=lambda place: kept[place + 1].step - kept[place - 1].step, default=0)
        gone.append(kept.pop(place))
        total -= sizes[gone[-1]]
    return gone
