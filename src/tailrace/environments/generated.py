"""Task rows drawn from a seed: nothing to download, nothing to store."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping

from tailrace.environments.rows import LazyRows, Row
from tailrace.errors import SettingsError
from tailrace.records import Json

_MAX_DRAWS = 1_000


def is_held_out(question: str, *, one_in: int = 4, hash_of: Callable[[bytes], int] = zlib.crc32) -> bool:
    """Whether a question belongs to the eval tasks: one in so many, by a hash of its text.

    So no seed, size or order of rows brings a held-out question into training.
    """
    return hash_of(question.encode()) % one_in == 0


class GeneratedRows(LazyRows):
    """Rows drawn by a function, each from its own random stream; `question` is the column that tells rows apart.

    A row is drawn again until it is on its side of the split: ends soon, since neither side is rare.

    >>> rows = GeneratedRows(lambda rng: {"prompt": str(rng.random())}, question="prompt", seed=0, size=1_000_000)
    >>> rows[999_999] == rows[999_999], is_held_out(rows[3]["prompt"])
    (True, False)
    """

    def __init__(
        self,
        draw: Callable[[random.Random], Mapping[str, Json]],
        *,
        question: str,
        seed: int | str,
        size: int,
        held_out: bool = False,
    ) -> None:
        self._draw = draw
        self._question = question
        self._seed = seed
        self._size = size
        self._held_out = held_out

    def __len__(self) -> int:
        return self._size

    def _row(self, position: int) -> Row:
        rng = random.Random(f"{self._seed}/{position}")
        for _ in range(_MAX_DRAWS):
            row = self._draw(rng)
            if self._belongs_to_eval(row) == self._held_out:
                return row
        raise SettingsError(
            f"{_MAX_DRAWS} draws gave no {'held-out' if self._held_out else 'training'} question; environment.args "
            "leave too few different questions"
        )

    def _belongs_to_eval(self, row: Row) -> bool:
        return is_held_out(str(row[self._question]))
