"""Which task comes next: every data set shuffled once per epoch, several mixed by weight, the position resumable."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tailrace.errors import DataError
from tailrace.records import Json, Task, TaskId


class TaskKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one task in one epoch."""

    environment: str
    epoch: int
    index: int


class Position(msgspec.Struct, frozen=True):
    """How far a data set was walked."""

    epoch: int
    drawn: int


class TaskStreamState(msgspec.Struct, frozen=True):
    """Where to go on: positions, and the tasks that were drawn but not trained."""

    positions: dict[str, Position]
    outstanding: list[TaskKey]


@dataclass(slots=True)
class TaskSource:
    """One environment's data set and its share of the mix."""

    environment: str
    rows: Sequence[Mapping[str, Json]]
    weight: float = 1.0
    required_columns: tuple[str, ...] = ()
    epoch: int = 0
    drawn: int = 0
    """Tasks of the current epoch handed out."""
    _order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise DataError(f"environment {self.environment!r} has an empty data set: there is no task to train on")

    def draw(self, seed: int) -> TaskKey:
        """The next task, in an order shuffled anew each epoch."""
        if self.drawn == len(self.rows):
            self.epoch, self.drawn, self._order = self.epoch + 1, 0, []
        if not self._order:
            self._order = _generator(seed, self.environment, self.epoch).permutation(len(self.rows)).tolist()
        self.drawn += 1
        return TaskKey(self.environment, self.epoch, self._order[self.drawn - 1])

    def task(self, key: TaskKey, seed: int) -> Task:
        """The task that `key` names. Raises `DataError` when its row lacks a required column."""
        task = Task(
            task_id=TaskId(f"{key.environment}/{key.index}"),
            environment=key.environment,
            index=key.index,
            row=self.rows[key.index],
            epoch=key.epoch,
            seed=int(_generator(seed, key.environment, key.epoch, key.index).integers(2**31)),
        )
        for column in self.required_columns:
            task[column]
        return task


class TaskStream:
    """Tasks without end, or for `max_epochs` of every data set. Interrupted tasks come first.

    The mix follows the weights: whichever environment lags its share most is drawn next.
    """

    def __init__(self, sources: Sequence[TaskSource], *, seed: int, max_epochs: int | None = None) -> None:
        if not sources:
            raise DataError("there is no environment to train on")
        self._sources = {source.environment: source for source in sources}
        self._seed = seed
        self._max_epochs = max_epochs
        self._again: deque[TaskKey] = deque()
        self._handed_out = dict.fromkeys(self._sources, 0)

    def next(self) -> tuple[TaskKey, Task] | None:
        """The next task, or None when every data set was walked `max_epochs` times."""
        if self._again:
            key = self._again.popleft()
        else:
            open_sources = [source for source in self._sources.values() if not self._is_exhausted(source)]
            if not open_sources:
                return None
            source = min(open_sources, key=lambda source: self._handed_out[source.environment] / source.weight)
            key = source.draw(self._seed)
        self._handed_out[key.environment] += 1
        return key, self._sources[key.environment].task(key, self._seed)

    @property
    def is_exhausted(self) -> bool:
        """Whether `next` would return None."""
        return not self._again and all(map(self._is_exhausted, self._sources.values()))

    def state(self, outstanding: Sequence[TaskKey]) -> bytes:
        """Encode the position; `outstanding` names the tasks handed out and not trained, to be started over."""
        positions = {name: Position(source.epoch, source.drawn) for name, source in self._sources.items()}
        return msgspec.json.encode(TaskStreamState(positions, [*outstanding, *self._again]))

    def restore(self, state: bytes) -> None:
        """Go on where `state` was taken. Raises `DataError` when it belongs to other environments."""
        decoded = msgspec.json.decode(state, type=TaskStreamState)
        if set(decoded.positions) != set(self._sources):
            raise DataError(
                f"the checkpoint was trained on the environments {sorted(decoded.positions)}, "
                f"this run has {sorted(self._sources)}: resume with the same environments"
            )
        for name, position in decoded.positions.items():
            self._sources[name].epoch, self._sources[name].drawn = position.epoch, position.drawn
        self._again = deque(decoded.outstanding)

    def _is_exhausted(self, source: TaskSource) -> bool:
        if self._max_epochs is None:
            return False
        return source.epoch >= self._max_epochs or (
            source.epoch == self._max_epochs - 1 and source.drawn >= len(source.rows)
        )


def _generator(seed: int, environment: str, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(environment.encode()), *numbers])
