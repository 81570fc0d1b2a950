"""A step's rollouts: what a table needs of each, and one of them whole.

A file is read once and kept as offsets and short rows, so that a rollout of many megabytes costs only who opens it.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.dashboard.tailing import Tail
from tailrace.errors import DataError
from tailrace.guards import decoded, guarded
from tailrace.records import Json, Outcome
from tailrace.reporting.rollout_records import VersionRange
from tailrace.reporting.sinks import Kind, rollouts_path

_MOST_ROLLOUTS = 8_192
"""Of one file that a table shows and a search sees."""
KEPT_ROLLOUTS = 32_768
"""In memory, of all files."""
_LINE_BYTES = 1 << 26
_TEXT_CHARACTERS = 20_000
_SEARCH_MATCHES = 200
_CUT_DEPTH = 32
_NAME = re.compile(r"(step|evaluation)_([0-9]+)\.jsonl")


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in a table: its record without messages and task."""

    rollout_id: str
    group_id: str
    task_id: str
    environment: str
    step: int = 0
    outcome: Outcome
    error: str = ""
    reward: float | None = None
    reward_components: dict[str, float | None] = {}
    advantage: float | None = None
    turns: int = 0
    branches: int = 0
    tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False
    attempt: int = 0
    versions: VersionRange | None = None
    mean_logprob: float | None = None
    started_s: float = 0.0
    duration_s: float = 0.0
    metrics: dict[str, float | None] = {}


class RolloutTable(msgspec.Struct, frozen=True):
    """A file of rollouts."""

    kind: str
    step: int
    rollouts: list[RolloutRow]
    left_out: int = 0
    """Those behind the first 8,192."""


class StepFiles(msgspec.Struct, frozen=True):
    """Which steps, and evaluations of which, have a file: of rollouts, or of their tokens."""

    steps: list[int]
    evaluations: list[int]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts a search is for; what is empty is not asked for."""

    text: str = ""
    environment: str = ""
    outcome: str = ""
    """A state, or a reason."""
    reward: str = ""
    """A range, as `0.5..1`, `..0` or `0.9..`; one without a reward is in none."""
    length: str = ""
    """A range of sampled tokens."""

    @property
    def is_any(self) -> bool:
        """Nothing is asked for."""
        return not any(msgspec.structs.astuple(self))

    def takes(self, row: RolloutRow) -> bool:
        """Whether it is one, but for the text.

        >>> row = RolloutRow(rollout_id="a", group_id="g", task_id="t", environment="e", outcome=Outcome.trained(1))
        >>> Wanted(outcome="trained").takes(row), Wanted(outcome="trained", reward="..1").takes(row)
        (True, False)
        """
        return (
            self.environment in ("", row.environment)
            and self.outcome in ("", str(row.outcome.state), row.outcome.reason)
            and _is_in(row.reward, self.reward)
            and _is_in(row.completion_tokens, self.length)
        )


def _is_in(value: float | None, given: str) -> bool:
    """
    >>> [_is_in(0.5, given) for given in ("", "0.5..1", "..0.4", "0.6..", "nonsense")]
    [True, True, False, False, True]
    """
    low, _, high = given.partition("..")
    bounds = [_bound(low, -math.inf), _bound(high, math.inf)]
    if bounds == [-math.inf, math.inf]:
        return True
    return value is not None and bounds[0] <= value <= bounds[1]


def _bound(text: str, without: float) -> float:
    try:
        return float(text)
    except ValueError:
        return without


class Match(msgspec.Struct, frozen=True):
    """A rollout that was searched for, and a little of what stands around the text."""

    kind: str
    step: int
    rollout_id: str
    task_id: str
    reward: float | None
    excerpt: str


class Matches(msgspec.Struct, frozen=True):
    """What a search has found so far."""

    matches: list[Match]
    left: int = 0
    """Files that were not looked at, as time was up or there were many matches."""
    next: str = ""
    """The first of those, as in `step_12`: where a search goes on."""
    left_out: int = 0
    """Rollouts behind the first 8,192 of the files that were looked at."""


@dataclass(slots=True)
class _Index:
    """What is known of one file."""

    tail: Tail
    rows: list[RolloutRow]
    places: list[tuple[int, int]]
    """Offset and length of each row's line."""
    num_left_out: int = 0
    """Lines behind those."""


_Located: TypeAlias = tuple[RolloutRow, tuple[int, int]]
"""A rollout, with the offset and the length of its line."""


class RolloutFiles:
    """One run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_kept = 0
        """Rollouts whose rows are in memory, of all files."""
        self._indexes: OrderedDict[Path, _Index] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, kind: Kind, step: int) -> Path:
        """The file of a step or of an evaluation."""
        return rollouts_path(self._folder, step, kind)

    def files(self) -> StepFiles:
        """All that there are, in order."""
        found: dict[str, list[int]] = {"step": [], "evaluation": []}
        try:
            with os.scandir(self._folder) as entries:
                for name in filter(None, (_NAME.fullmatch(entry.name) for entry in entries)):
                    found[name[1]].append(int(name[2]))
        except OSError:
            pass
        return StepFiles(sorted(found["step"]), sorted(found["evaluation"]))

    def newest_first(self, viewed: tuple[Kind, int]) -> list[tuple[Kind, int]]:
        """All that there are, that which is viewed before the others."""
        files = self.files()
        found: list[tuple[Kind, int]] = [("evaluation", step) for step in files.evaluations]
        found += [("step", step) for step in files.steps]
        return sorted(found, key=lambda file: (file != viewed, -file[1]))

    def table(self, kind: Kind, step: int) -> RolloutTable:
        """One file's, without lines that were cut short; empty without the file."""
        with self._lock:
            index = self._index(kind, step)
            return RolloutTable(kind, step, list(index.rows), index.num_left_out)

    def rows(self, kind: Kind, step: int) -> list[RolloutRow]:
        """Those of one file's table."""
        return self.table(kind, step).rollouts

    def record(self, kind: Kind, step: int, rollout_id: str) -> dict[str, Json] | None:
        """One rollout's line, whole; None where the file has it not."""
        with self._lock:
            index = self._index(kind, step)
            place = next(
                (place for row, place in zip(index.rows, index.places, strict=True) if row.rollout_id == rollout_id),
                None,
            )
            left_out = index.num_left_out
        path, line = self.path(kind, step), None
        if place is not None:
            line = _line_at(path, *place)
        elif left_out:
            line = _line_of(path, rollout_id)
        if line is None:
            return None
        with guarded(f"rollout {rollout_id} can no longer be read", DataError):
            return msgspec.json.decode(line, type=dict[str, Json])

    def search(self, wanted: Wanted, files: list[tuple[Kind, int]], *, seconds: float) -> Matches:
        """Rollouts that are wanted, and whose line holds the text, whatever its case: in these files, as far as time
        allows."""
        until, found, left_out = time.monotonic() + seconds, list[Match](), 0
        needle = msgspec.json.encode(wanted.text)[1:-1].lower()
        for number, (kind, step) in enumerate(files):
            if len(found) >= _SEARCH_MATCHES or (number and time.monotonic() > until):
                return Matches(found, len(files) - number, f"{kind}_{step}", left_out)
            with self._lock:
                index = self._index(kind, step)
                left_out += index.num_left_out
                places = [one for one in zip(index.rows, index.places, strict=True) if wanted.takes(one[0])]
            excerpts = _excerpts(self.path(kind, step), needle, places) if needle else _task_ids(places)
            found += [Match(kind, step, row.rollout_id, row.task_id, row.reward, excerpt) for row, excerpt in excerpts]
        return Matches(found, left_out=left_out)

    def _index(self, kind: Kind, step: int) -> _Index:
        path = self.path(kind, step)
        index = self._indexes.pop(path, None) or _Index(Tail(path), [], [])
        self._indexes[path] = index
        if index.tail.start_over_if_replaced():
            index.rows, index.places, index.num_left_out = [], [], 0
        for line in index.tail.lines():
            length = len(line)
            offset = index.tail.offset - length - 1
            if len(index.rows) == _MOST_ROLLOUTS:
                index.num_left_out += 1
                continue
            row = _row(line) if length <= _LINE_BYTES else None
            if row is not None:
                index.rows.append(row)
                index.places.append((offset, length))
        self._forget()
        return index

    def _forget(self) -> None:
        """The files that were asked for longest ago, as far as there are too many rollouts in memory."""
        kept = sum(len(index.rows) for index in self._indexes.values())
        while kept > KEPT_ROLLOUTS and len(self._indexes) > 1:
            _, forgotten = self._indexes.popitem(last=False)
            kept -= len(forgotten.rows)
        self.num_kept = kept


def _line_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _line_of(path: Path, rollout_id: str) -> bytes | None:
    """Of a rollout that is not in its file's table."""
    named = msgspec.json.encode(rollout_id)
    return next((line for line in Tail(path).lines() if named in line and _is_of(line, rollout_id)), None)


def _is_of(line: bytes, rollout_id: str) -> bool:
    row = _row(line)
    return row is not None and row.rollout_id == rollout_id


def _excerpts(path: Path, needle: bytes, places: Sequence[_Located]) -> Iterator[tuple[RolloutRow, str]]:
    """Those whose line holds the text, with a little of what stands around it; a line at a time is in memory."""
    with suppress(OSError), path.open("rb") as file:
        for row, (offset, length) in places:
            file.seek(offset)
            line = file.read(length)
            if (place := line.lower().find(needle)) >= 0:
                yield row, line[max(0, place - 60) : place + len(needle) + 60].decode("utf-8", "ignore")


def _task_ids(places: Sequence[_Located]) -> Iterator[tuple[RolloutRow, str]]:
    return ((row, row.task_id) for row, _ in places)


_ROW = msgspec.json.Decoder(RolloutRow)


def _row(line: bytes) -> RolloutRow | None:
    return decoded(_ROW.decode, line)


def shortened(value: Json, depth: int = 0) -> Json:
    """The same with long texts cut: `{"cut": ..., "characters": ...}` stands for one, which can be asked for whole."""
    if isinstance(value, str):
        return {"cut": value[:_TEXT_CHARACTERS], "characters": len(value)} if len(value) > _TEXT_CHARACTERS else value
    if depth > _CUT_DEPTH:
        return "..."
    if isinstance(value, list):
        return [shortened(inner, depth + 1) for inner in value]
    if isinstance(value, dict):
        return {key: shortened(inner, depth + 1) for key, inner in value.items()}
    return value


def part(record: Json, path: list[str]) -> Json:
    """What stands at a place of a record. Raises `DataError` where there is no such place."""
    for key in path:
        with guarded(f"there is nothing at {'/'.join(path)}", DataError):
            match record:
                case list():
                    record = record[int(key)]
                case dict():
                    record = record[key]
                case _:
                    raise KeyError(key)
    return record
