"""Task rows: sequences whose rows are made or read when they are used, and a row as programs outside read it."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias, overload

import msgspec

from tailrace.errors import EnvironmentFailed
from tailrace.records import Json, Task

Row: TypeAlias = Mapping[str, Json]


class LazyRows(Sequence[Row]):
    """A sequence by a length and one row at a time."""

    @abstractmethod
    def _row(self, position: int) -> Row:
        """The row at a position from 0 to the length."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowView: ...
    def __getitem__(self, index: int | slice) -> Row | RowView:
        positions = range(len(self))[index]
        return RowView(self, positions) if isinstance(positions, range) else self._row(positions)


class SplitRows(LazyRows):
    """Rows of one side of a split that the text of a row decides: none is taken out of them for the other side."""

    num_kinds = 1
    """Rows at the beginning that stand for all others: each is of a kind of its own."""


class RowView(LazyRows):
    """Some rows of a sequence, in an order of their own."""

    def __init__(self, rows: Sequence[Row], indices: Sequence[int]) -> None:
        self.source = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def _row(self, position: int) -> Row:
        return self.source[self._indices[position]]


class EmptyRows(LazyRows):
    """Rows without a column, for environments that draw their own tasks.

    >>> EmptyRows(3)[2]
    {}
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def _row(self, position: int) -> Row:
        return {}


class ClientRow(dict[str, Json]):
    """The row of a task that a client outside brings: empty until the first of its rollouts is claimed."""

    def __init__(self, columns: Collection[str] = ()) -> None:
        """`columns` are those that it must be brought with, at least."""
        super().__init__()
        self._columns = columns
        self.is_filled = False

    def require(self, columns: Collection[str]) -> None:
        """It must be brought with these as well."""
        self._columns = (*self._columns, *columns)

    def missing(self, row: Row) -> str | None:
        """A column that `row` lacks."""
        return next((column for column in self._columns if column not in row), None)

    def fill(self, row: Row) -> None:
        """All rollouts of the task are about this from now on."""
        self.update(row)
        self.is_filled = True


class ClientRows(LazyRows):
    """Places for tasks that clients outside bring: a row of its own each time that one is drawn."""

    def __init__(self, size: int, columns: Collection[str]) -> None:
        self._size, self._columns = size, columns

    def __len__(self) -> int:
        return self._size

    def _row(self, position: int) -> Row:
        return ClientRow(self._columns)


def is_in_memory(rows: Sequence[Row]) -> bool:
    """Whether the rows are in memory; others are generated or read when they are used, which takes time."""
    return is_in_memory(rows.source) if isinstance(rows, RowView) else isinstance(rows, list | tuple)


class AllBut(Sequence[int]):
    """The numbers below `length` without the excluded ones: memory grows with the excluded ones only.

    >>> list(AllBut(6, [1, 4]))
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
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        positions = range(self._length)[index]
        if isinstance(positions, range):
            return [self._number(position) for position in positions]
        return self._number(positions)

    def _number(self, position: int) -> int:
        return position + bisect_right(self._kept_before, position)


def row_as_json(task: Task) -> bytes:
    """A task's row. Raises `EnvironmentFailed` for one that JSON cannot hold."""
    try:
        return msgspec.json.encode(dict(task.row))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"the row of task {task.task_id} cannot be written as JSON: {error}") from error
