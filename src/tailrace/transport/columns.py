"""Columns that lie in a segment: views of it, checked against what it holds.

`what` is in messages: whose columns they are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import CorruptData
from tailrace.transport.segments import Segment, TensorEntry

DTYPES = {"I32": np.dtype(np.int32), "F32": np.dtype(np.float32), "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8)}
"""NumPy's types by their names in a segment."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

NAMED = "column/"
"""In front of the names of columns that have names of their own."""


def view_column(what: str, segment: Segment, name: str, dtype: str) -> NDArray[np.generic]:
    """A column of one dimension. Raises `CorruptData` where there is none of this name and type."""
    entry = segment.tensors.get(name)
    if entry is None or entry.dtype != dtype or len(entry.shape) != 1:
        raise CorruptData(f"{what} needs a column {name!r} of {dtype}; found {entry}")
    return _view(what, segment, name, entry)


def view_named_columns(what: str, segment: Segment, num_tokens: int) -> dict[str, NDArray[np.generic]]:
    """Columns that have names of their own. Raises `CorruptData` for one that is not of these tokens."""
    columns = {}
    for name, entry in segment.tensors.items():
        if name.startswith(NAMED):
            length, *width = entry.shape or (-1,)
            if entry.dtype not in ("F32", "I32") or length != num_tokens or len(width) > 1 or 0 in width:
                raise CorruptData(f"{what} has {num_tokens} tokens and a column {name!r} of {entry}")
            columns[name.removeprefix(NAMED)] = _view(what, segment, name, entry)
    return columns


def spans_are_valid(edges: NDArray[np.generic], num_tokens: int) -> bool:
    """Whether starts and ends of spans are in order and within so many tokens."""
    return len(edges) % 2 == 0 and is_monotonic(np.concatenate(([0], edges, [num_tokens])), num_tokens)


def is_monotonic(offsets: NDArray[np.generic], end: int) -> bool:
    """Whether offsets go from 0 to `end` and never back."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end:
        return False
    return bool(np.all(offsets[1:] >= offsets[:-1]))  # type: ignore[operator]


def _view(what: str, segment: Segment, name: str, entry: TensorEntry) -> NDArray[np.generic]:
    dtype, start, count = DTYPES[entry.dtype], entry.data_offsets[0], math.prod(entry.shape)
    if start % dtype.itemsize:
        raise CorruptData(f"column {name!r} of {what} is not aligned")
    flat = np.frombuffer(segment.mapping, dtype, count, start) if count else np.empty(0, dtype)
    return flat.reshape(entry.shape)
