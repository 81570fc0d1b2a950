"""What the report reads of a finished run: `metrics.jsonl`, `rollouts/*.jsonl`, `summary.json`, the settings' text."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from typing_extensions import TypeIs

from tailrace.errors import DataError
from tailrace.records import Json
from tailrace.reporting.masking import masked_text
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.sinks import read_jsonl, read_rewards, read_rollout_at, steps_of_rollouts
from tailrace.reporting.summary import RunSummary, read_summary
from tailrace.reporting.tokens import token_files

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FOLDER = "rollouts"
_NEWEST_FILES = 5
_Place: TypeAlias = tuple[float, int, int]
"""A rollout in the files: its reward, its step and where its line begins."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the run: `[num_points]` each."""

    steps: Sequence[float]
    values: Sequence[float]

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self.values[-1] if self.values else None


@dataclass(frozen=True, slots=True)
class ChosenRollout:
    """A rollout that the report shows, and why."""

    title: str
    record: RolloutRecord


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Everything that a report is made of."""

    name: str
    columns: Mapping[str, Series]
    """Each metric of `metrics.jsonl` by name, in order of appearance, without the lines that do not have it."""
    rollouts: list[ChosenRollout]
    summary: RunSummary | None
    settings: str
    """The text of its settings, keys of servers masked."""

    def series(self, name: str) -> Series:
        """One metric over the steps; without a point where no line has it."""
        return self.columns.get(name, Series((), ()))

    def names(self, prefix: str, suffix: str) -> list[str]:
        """Metric names of a family that occur, in order of appearance."""
        return [name for name in self.columns if name.startswith(prefix) and name.endswith(suffix)]

    def latest(self) -> dict[str, float]:
        """The newest value of every metric, by name."""
        return {name: self.columns[name].values[-1] for name in sorted(self.columns)}


def read_run_folder(folder: Path) -> RunFolder:
    """Read a run. Raises `DataError` when this is no run folder: it holds neither metrics nor a summary."""
    summary = read_summary(folder)
    if summary is None and not (folder / METRICS_FILE).is_file():
        raise DataError(f"{folder} is not a run folder: it has neither {METRICS_FILE} nor summary.json")
    token_steps = {file.step for file in token_files(folder) if not file.is_evaluation}
    settings = folder / "config.toml"
    return RunFolder(
        name=folder.resolve().name if summary is None else summary.name,
        columns=_read_columns(folder / METRICS_FILE),
        rollouts=choose_rollouts(folder / ROLLOUTS_FOLDER, token_steps),
        summary=summary,
        settings=masked_text(settings.read_text(encoding="utf-8", errors="replace")) if settings.is_file() else "",
    )


def _read_columns(metrics: Path) -> dict[str, Series]:
    """Numbers in arrays: as objects those of a long run come to gigabytes."""
    found: dict[str, tuple[array[float], array[float]]] = {}
    for row in read_jsonl(metrics):
        if not is_number(step := row.get("step")):
            continue
        for name, value in row.items():
            if is_number(value):
                if (column := found.get(name)) is None:
                    column = found[name] = array("d"), array("d")
                column[0].append(step)
                column[1].append(value)
    return {name: Series(*column) for name, column in found.items()}


def choose_rollouts(folder: Path, token_steps: Collection[int] = ()) -> list[ChosenRollout]:
    """The best, median and worst of the newest files, and a typical one of the first file, to see what was learned.

    The newest are those of which tokens were written, where there are such.
    """
    steps = steps_of_rollouts(folder)
    with_tokens = [step for step in steps if step in token_steps]
    latest = steps[-_NEWEST_FILES:]
    newest = _scored(folder, [step for step in latest if step in with_tokens] or with_tokens[-1:] or latest)
    if not newest:
        return []
    places = (("Worst", 0), ("Median", len(newest) // 2), ("Best", len(newest) - 1))
    found = [one for title, place in places for one in _chosen(folder, title, newest[place])]
    rollouts = sorted(
        {one.record.rollout_id: one for one in found}.values(), key=lambda one: -(one.record.reward or 0.0)
    )
    if len(steps) > _NEWEST_FILES and (first := _scored(folder, steps[:1])):
        rollouts += _chosen(folder, "Where it began", first[len(first) // 2])
    return rollouts


def _scored(folder: Path, steps: Sequence[int]) -> list[_Place]:
    """Rollouts with a reward, lowest first; of equal ones the oldest first."""
    places = [(reward, step, offset) for step in steps for reward, offset in read_rewards(folder, step)]
    return sorted(places, key=lambda place: place[0])


def _chosen(folder: Path, title: str, place: _Place) -> list[ChosenRollout]:
    """None where the rest of the line is no record's."""
    _, step, offset = place
    record = read_rollout_at(folder, step, offset)
    return [] if record is None else [ChosenRollout(title, record)]


def is_number(value: Json) -> TypeIs[int | float]:
    """No truth value is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)
