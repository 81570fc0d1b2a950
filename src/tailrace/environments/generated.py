"""Task rows drawn from a seed: nothing to download, nothing to store."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping

from tailrace.environments.rows import LazyRows, Row
from tailrace.errors import SettingsError
from tailrace.records import Json

_HELD_OUT_ONE_IN = 4
_MAX_DRAWS = 1_000


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the eval tasks: a quarter of all, by a hash of its text.

    So no seed, size or order of rows brings a held-out question into training.
    """
    return zlib.crc32(question.encode()) % _HELD_OUT_ONE_IN == 0


class GeneratedRows(LazyRows):
    """Rows drawn by a function, each from its own random stream; `question` is the column that tells rows apart.

    >>> rows = GeneratedRows(lambda rng: {"prompt": str(rng.random())}, question="prompt", seed=0, size=1_000_000)
    >>> rows[999_999] == rows[999_999], is_held_out(rows[3]["prompt"])
    (True, False)
    """

    def __init__(
        self,
        draw: Callable[[random.Random], Mapping[str, Json]],
        *,
        question: str,
        seed: int,
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
            if is_held_out(str(row[self._question])) == self._held_out:
                return row
        raise SettingsError(
            f"{_MAX_DRAWS} draws gave no {'held-out' if self._held_out else 'training'} question; environment.args "
            "leave too few different questions"
        )
