"""Task rows drawn from a seed: nothing to download, nothing to store."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from functools import partial

from tailrace.environments.protocol import Agent, EnvironmentSpec, RewardFunction
from tailrace.environments.rows import Row, SplitRows
from tailrace.environments.single_turn import single_turn_agent
from tailrace.errors import SettingsError
from tailrace.records import Json

_MAX_DRAWS = 1_000


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the eval tasks: one in four, by a hash of its text, whatever the seed and size."""
    return zlib.crc32(question.encode()) % 4 == 0


def generated_environment(
    name: str,
    draw: Callable[[random.Random], Mapping[str, Json]],
    *,
    question: str,
    seed: int,
    size: int,
    eval_size: int,
    description: str,
    agent: Agent | None = None,
    reward: RewardFunction | None = None,
) -> EnvironmentSpec:
    """A trusted environment whose drawn rows hold a `prompt` and an `answer`; one turn unless it has an `agent`."""
    rows = partial(GeneratedRows, draw, is_eval=lambda row: is_held_out(row[question]), seed=seed)
    return EnvironmentSpec(
        name=name,
        description=description,
        train_tasks=rows(size=size),
        eval_tasks=rows(size=eval_size, held_out=True),
        agent=agent or single_turn_agent(),
        reward=reward,
        required_columns=("prompt", "answer"),
        trusted=True,
    )


class GeneratedRows(SplitRows):
    """Rows drawn by a function, each from its own random stream; `is_eval` says to which side of the split one belongs.

    A row is drawn again until it is on its side: ends soon, since neither side is rare.

    >>> rows = GeneratedRows(lambda rng: {"n": rng.randrange(9)}, is_eval=lambda row: row["n"] == 1, seed=0, size=10**6)
    >>> rows[999_999] == rows[999_999], rows[3]["n"] == 1
    (True, False)
    """

    def __init__(
        self,
        draw: Callable[[random.Random], Mapping[str, Json]],
        *,
        is_eval: Callable[[Row], bool],
        seed: int | str,
        size: int,
        held_out: bool = False,
    ) -> None:
        self._draw = draw
        self._is_eval = is_eval
        self._seed = seed
        self._size = size
        self._held_out = held_out

    def __len__(self) -> int:
        return self._size

    def _row(self, position: int) -> Row:
        rng = random.Random(f"{self._seed}/{position}")
        for _ in range(_MAX_DRAWS):
            row = self._draw(rng)
            if self._is_eval(row) == self._held_out:
                return row
        raise SettingsError(
            f"{_MAX_DRAWS} draws gave no {'held-out' if self._held_out else 'training'} question; environment.args "
            "leave too few different questions"
        )
