"""Sequences of task rows whose rows are made or read when they are used."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, overload

from tailrace.records import Json

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
