"""Task rows from files, and the split into training and held-out rows."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import overload

from tailrace.environments.files import open_arrow_folder, open_jsonl, open_parquet
from tailrace.errors import DataError
from tailrace.records import Json

Row = Mapping[str, Json]

_HELD_OUT_SEED = 20_000_003  # fixed, so that every run and every process holds out the same rows


class RowView(Sequence[Row]):
    """Some rows of a sequence, in an order of their own, fetched when asked for."""

    def __init__(self, rows: Sequence[Row], indices: Sequence[int]) -> None:
        self._rows = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowView: ...
    def __getitem__(self, index: int | slice) -> Row | RowView:
        if isinstance(index, slice):
            return RowView(self._rows, self._indices[index])
        return self._rows[self._indices[index]]


class _AllBut(Sequence[int]):
    """The numbers below `length` without the excluded ones: memory grows with the excluded ones only.

    >>> list(_AllBut(6, [1, 4]))
    [0, 2, 3, 5]
    """

    def __init__(self, length: int, excluded: Iterable[int]) -> None:
        ordered = sorted(excluded)
        self._length = length - len(ordered)
        self._kept_before = [number - rank for rank, number in enumerate(ordered)]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        positions = range(self._length)[index]
        if isinstance(positions, range):
            return [self._number(position) for position in positions]
        return self._number(positions)

    def _number(self, position: int) -> int:
        return position + bisect_right(self._kept_before, position)


def first_rows(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """At most the first `count` rows, without fetching any."""
    return rows if count >= len(rows) else RowView(rows, range(count))


def hold_out(rows: Sequence[Row], count: int, *, name: str) -> tuple[Sequence[Row], Sequence[Row]]:
    """Split into training rows and `count` held-out ones: the same rows each time, spread over the whole, none in both.

    Raises:
        DataError: Nothing would be left to train on.

    >>> train, held_out = hold_out([{"n": n} for n in range(10)], 3, name="digits")
    >>> len(train), len(held_out), {row["n"] for row in train} & {row["n"] for row in held_out}
    (7, 3, set())
    """
    if count >= len(rows):
        raise DataError(
            f"environment {name!r} has {len(rows)} tasks and {count} are to be held out, which leaves none to train "
            "on; lower environment.eval_tasks or give environment.eval_data"
        )
    chosen = sorted(random.Random(_HELD_OUT_SEED).sample(range(len(rows)), count))
    return RowView(rows, _AllBut(len(rows), chosen)), RowView(rows, chosen)


def load_rows(path: str | Path) -> Sequence[Row]:
    """Task rows of a `.jsonl` or `.parquet` file, or of a folder that Hugging Face `datasets` saved to disk.

    Rows are read when asked for; the file must stay in place while the run lasts.

    Raises:
        DataError: It is missing, empty, malformed (with file and line) or of no kind named above.
        SettingsError: An extra that reads it is not installed.
    """
    location = Path(path).expanduser()
    if not location.exists():
        raise DataError(f"data set {location} does not exist (looked in {Path.cwd()})")
    rows = _open(location)
    if len(rows) == 0:
        raise DataError(f"data set {location} is empty: it has no task row")
    return rows


def _open(location: Path) -> Sequence[Row]:
    if location.is_dir():
        return open_arrow_folder(location)
    if location.suffix in {".jsonl", ".ndjson"}:
        return open_jsonl(location)
    if location.suffix == ".parquet":
        return open_parquet(location)
    raise DataError(f"data set {location} is of no known kind; expected .jsonl, .parquet or a `datasets` folder")
