"""Columns of tokens that have a name of their own: what a loss reads beside log-probabilities and advantages.

    a branch's tokens ─► float32 or int32 [num_tokens] or [num_tokens, k] ─► batch ─► rows ─► `LossTokens.columns`

A branch that lacks a column that others of its batch have is 0 there, and so are tokens that nothing was set for; in
columns of weights that all sampled tokens have it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CROSS_ENTROPY_WEIGHTS = "cross_entropy_weights"
"""The column of weights that tokens have in the cross-entropy component, float32; 0: they do not bear it."""

REFERENCE_KL_WEIGHTS = "reference_kl_weights"
"""The column of weights that sampled tokens have in the divergence from a reference, float32; where none is set, 1."""

DISTILLATION_WEIGHTS = "distillation_weights"
"""The same in that from a teacher."""

WEIGHTS_OF_SAMPLED = frozenset({REFERENCE_KL_WEIGHTS, DISTILLATION_WEIGHTS})
WEIGHTS = WEIGHTS_OF_SAMPLED | {CROSS_ENTROPY_WEIGHTS}

TEACHER_LOGPROBS = "teacher_logprobs"
"""The column of log-probabilities that a teacher gives to sampled tokens, float32."""

TEACHER_TOP_IDS = "teacher_top_ids"
"""The column of the k tokens that a teacher finds likeliest in the place of each sampled one, int32 [num_tokens, k];
-1 where it names fewer."""

TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"
"""The column of their log-probabilities, float32 [num_tokens, k]; 0 where it names none."""

RESERVED = frozenset(
    {TEACHER_LOGPROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, "reference_logprobs", "proximal_logprobs"}
)
"""Columns that scoring and the trainer fill."""


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """What a column holds of each token."""

    dtype: np.dtype[np.generic]
    """float32 or int32."""
    width: tuple[int, ...] = ()
    """Nothing, or (k,)."""

    @classmethod
    def of(cls, column: NDArray[np.generic]) -> ColumnKind:
        """That of [num_tokens, *width]."""
        return cls(column.dtype, column.shape[1:])

    def joined(self, other: ColumnKind) -> ColumnKind:
        """What holds the numbers of both, which are of one width: float32, unless both are int32."""
        return self if self.dtype == np.float32 else ColumnKind(other.dtype, self.width)

    @property
    def num_bytes(self) -> int:
        """Of one token."""
        return self.dtype.itemsize * int(np.prod(self.width, dtype=np.int64))

    def unset(self, name: str, count: int) -> NDArray[np.generic]:
        """[count, *width]: what tokens have in the column `name` that nothing was set for."""
        return np.full((count, *self.width), name in WEIGHTS_OF_SAMPLED, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(['num_tokens', *map(str, self.width)])}]"


def as_column(name: str, values: object) -> NDArray[np.generic]:
    """`values` as a contiguous column: whole numbers as int32, others as float32.

    Raises `ValueError` for a name that is none, for values of another shape, and for numbers beyond int32.

    >>> as_column("weights", [0.5, 1]).dtype, as_column("ids", [[3, 4], [5, 6]]).shape
    (dtype('float32'), (2, 2))
    """
    if not name.isidentifier():
        raise ValueError(f"a column is named as a variable is, not {name!r}")
    given = np.asarray(values)
    if given.ndim not in (1, 2) or given.dtype.kind not in "biuf" or 0 in given.shape[1:]:
        raise ValueError(
            f"column {name!r} needs numbers, [num_tokens] or [num_tokens, k]; it was given {given.dtype} "
            f"{list(given.shape)}"
        )
    is_whole = given.dtype.kind in "iu" and name not in WEIGHTS
    column = np.ascontiguousarray(given, np.int32 if is_whole else np.float32)
    if name in WEIGHTS and not (column.ndim == 1 and np.isfinite(column).all()):
        raise ValueError(f"column {name!r} holds weights: one finite number for each token")
    if column.dtype == np.int32 and given.dtype.itemsize >= 4 and not np.array_equal(column, given):
        raise ValueError(f"column {name!r} has numbers that int32 cannot hold")
    return column
