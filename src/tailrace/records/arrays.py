"""Array types of per-token data."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]


def as_token_ids(token_ids: object) -> Int32Array:
    """Token ids as one contiguous int32 array, whatever sequence they came in.

    >>> as_token_ids([1, 2, 3])
    array([1, 2, 3], dtype=int32)
    """
    return np.ascontiguousarray(token_ids, dtype=np.int32)


def common_prefix(first: Int32Array, second: Int32Array) -> int:
    """Number of leading tokens that two sequences share.

    >>> common_prefix(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32))
    2
    """
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


def readonly(array: NDArray[np.generic]) -> None:
    """Forbid writes through this array (a view handed to a reader)."""
    array.setflags(write=False)  # half of what its `flags` cost
