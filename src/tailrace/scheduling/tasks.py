"""Which task comes next: every data set shuffled once per epoch, several mixed by weight, the position resumable.

`end` says of each task that was handed out whether it was trained: as soon as any of its group is, or once nothing of
that can be any more. The mix of environments follows it (see `mix`).
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.environments import EnvironmentSpec
from tailrace.environments.rows import is_in_memory
from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import Task, TaskId
from tailrace.scheduling.mix import Count, EnvironmentFigures, EnvironmentMix, MixState

ENCODED_AT_ONCE = 1024
"""Outstanding tasks encoded in one slice: half a millisecond."""


class TaskKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one task in one epoch."""

    environment: str
    epoch: Count
    index: Count


class Position(msgspec.Struct, frozen=True):
    """Position in a data set."""

    epoch: Count
    drawn: Count
    tasks: Count | None = None
    """The data set's length, by which its held-out tasks and the order of an epoch are drawn; None: not known."""


class TaskStreamState(msgspec.Struct, frozen=True):
    """Where a resumed run goes on: positions, the tasks drawn and in no batch, and the mix."""

    positions: dict[str, Position]
    outstanding: list[TaskKey]
    mix: MixState = msgspec.field(default_factory=lambda: MixState({}))


@dataclass(slots=True)
class TaskSource:
    """One environment's training tasks and its share of the mix."""

    spec: EnvironmentSpec
    weight: float = 1.0
    epoch: int = 0
    drawn: int = 0
    """Tasks of the current epoch handed out."""
    _order: NDArray[np.int32 | np.int64] | None = None
    """Of the current epoch; None before its first task is drawn."""

    def __post_init__(self) -> None:
        if not len(self.spec.train_tasks):
            raise DataError(f"environment {self.environment!r} has an empty data set: there is no task to train on")

    @property
    def environment(self) -> str:
        """The environment's name."""
        return self.spec.name

    def draw(self, seed: int) -> TaskKey:
        """The next task, in an order shuffled anew each epoch."""
        rows = len(self.spec.train_tasks)
        if self.drawn == rows:
            self.epoch, self.drawn, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = np.arange(rows, dtype=_order_type(rows))
            _generator(seed, self.environment, self.epoch).shuffle(self._order)
        self.drawn += 1
        return TaskKey(self.environment, self.epoch, int(self._order[self.drawn - 1]))

    def task(self, key: TaskKey, seed: int) -> Task:
        """The task that `key` names. Raises `DataError` when its row lacks a required column."""
        task_seed = int(_generator(seed, key.environment, key.epoch, key.index).integers(2**31))
        return self.spec.train_task(key.index, seed=task_seed)

    def is_exhausted(self, max_epochs: int | None) -> bool:
        """Whether every task was handed out `max_epochs` times."""
        rows = len(self.spec.train_tasks)
        return max_epochs is not None and self.epoch * rows + self.drawn >= max_epochs * rows


class TaskStream:
    """Tasks without end, or for `max_epochs` of every data set. Interrupted tasks come first.

    The mix of what is trained follows the weights, which count tasks: see `EnvironmentMix`.
    """

    def __init__(self, sources: Sequence[TaskSource], *, seed: int, max_epochs: int | None = None) -> None:
        if not sources:
            raise DataError("there is no environment to train on")
        self._sources = {source.environment: source for source in sources}
        self._seed = seed
        self._max_epochs = max_epochs
        self._again: deque[TaskKey] = deque()
        """Interrupted or restarted: drawn next."""
        self._mix = EnvironmentMix({source.environment: source.weight for source in sources})
        self._outstanding: dict[TaskKey, int] = {}
        """Handed out and not ended, in that order; how often each was restarted because its group was too old."""
        self._making = asyncio.Lock()
        self.restarted = 0
        """Restarts of tasks since the run began."""

    def draw(self, *, without: Collection[str] = ()) -> TaskKey | None:
        """Hand out the next task of an environment that is not among `without`; None where none has a task left."""
        if again := next((key for key in self._again if key.environment not in without), None):
            key = again
            self._again.remove(key)
        elif open_sources := [name for name in self._open_sources() if name not in without]:
            key = self._sources[self._mix.draw(open_sources)].draw(self._seed)
        else:
            return None
        if key not in self._outstanding:
            self._mix.hand_out(key.environment)
            self._outstanding[key] = 0
        return key

    @property
    def is_exhausted(self) -> bool:
        """Whether there is nothing to draw. What is handed out may still be restarted."""
        return not self._again and not self._open_sources()

    def restart(self, key: TaskKey, *, is_stale: bool) -> None:
        """A task handed out is drawn again, before any other; because its group was too old, or for another reason."""
        self._outstanding[key] = self.restarts(key) + is_stale
        self._again.append(key)
        self.restarted += 1

    def restarts(self, key: TaskKey) -> int:
        """How often a task that is handed out was restarted because its group was too old."""
        return self._outstanding.get(key, 0)

    def end(self, key: TaskKey, *, trained: bool) -> None:
        """A task handed out has a group in a batch, or never will; only the first call for a task counts."""
        if self._outstanding.pop(key, None) is not None:
            self._mix.end(key.environment, trained=trained)

    def scored(self, environment: str, rewards: Sequence[float], *, trainable: bool) -> None:
        """The rewards of a group of `environment`, and whether the group can be trained on."""
        self._mix.scored(environment, rewards, trainable=trainable)

    def reward_range(self, environment: str) -> tuple[float, float] | None:
        """The lowest and the highest reward that `environment` ever gave; None while none of its tasks was trained."""
        return self._mix.reward_range(environment)

    @property
    def environments(self) -> dict[str, EnvironmentFigures]:
        """Figures of every environment, by name."""
        return self._mix.figures

    async def make(self, key: TaskKey) -> Task:
        """The task handed out as `key`, of its row alone: the same whenever it is made.

        Off the event loop unless its row is in memory, since generating one may take a second; one at a time, since
        rows need not be thread-safe. Raises `DataError` when its row lacks a required column.
        """
        source = self._sources[key.environment]
        if is_in_memory(source.spec.train_tasks):
            return source.task(key, self._seed)
        async with self._making:
            return await asyncio.to_thread(source.task, key, self._seed)

    def task_id(self, key: TaskKey) -> TaskId:
        """The id of the task of `key`."""
        return self._sources[key.environment].spec.train_task_id(key.index)

    def state(self) -> Generator[None, None, bytes]:
        """Encode where a run that is resumed goes on: tasks handed out and not ended are started over.

        Yields now and then; the state is the one at the first slice.
        """
        positions = {
            name: Position(source.epoch, source.drawn, len(source.spec.train_tasks))
            for name, source in self._sources.items()
        }
        mix = msgspec.Raw(msgspec.json.encode(self._mix.state()))
        keys = iter([*self._outstanding, *(key for key in self._again if key not in self._outstanding)])
        parts = []
        while part := list(islice(keys, ENCODED_AT_ONCE)):
            parts.append(msgspec.json.encode(part)[1:-1])
            yield
        listed = msgspec.Raw(b"[" + b",".join(parts) + b"]")
        return msgspec.json.encode({"positions": positions, "outstanding": listed, "mix": mix})

    def restore(self, state: bytes) -> None:
        """Go on where `state` was taken. Raises `DataError` for what is none, or belongs to other environments."""
        with guarded("the scheduler's state beside the checkpoint is damaged", DataError):
            decoded = msgspec.json.decode(state, type=TaskStreamState)
        if set(decoded.positions) != set(self._sources):
            raise DataError(
                f"the checkpoint was trained on the environments {sorted(decoded.positions)}, "
                f"this run has {sorted(self._sources)}: resume with the same environments"
            )
        for name, position in decoded.positions.items():
            now = len(self._sources[name].spec.train_tasks)
            if position.tasks not in (None, now):
                raise DataError(
                    f"the checkpoint was trained with {position.tasks} tasks of the environment {name!r}, and this run "
                    f"has {now}: others would be held out, and the epoch shuffled anew. Resume with the same data"
                )
        drawn = [(name, position.drawn - 1) for name, position in decoded.positions.items()]
        for name, index in [*drawn, *((key.environment, key.index) for key in decoded.outstanding)]:
            if name not in self._sources or index >= len(self._sources[name].spec.train_tasks):
                raise DataError(
                    f"the checkpoint was trained on a task {index} of the environment {name!r}, which this run has "
                    "not: resume with the same data"
                )
        for name, position in decoded.positions.items():
            source = self._sources[name]
            source.epoch, source.drawn = position.epoch, position.drawn
        self._again, self._outstanding = deque(decoded.outstanding), {}
        self._mix.restore(decoded.mix)

    def _open_sources(self) -> list[str]:
        return [name for name, source in self._sources.items() if not source.is_exhausted(self._max_epochs)]


def order_bytes(rows: int) -> int:
    """What a data set's order in an epoch takes, which is drawn as a whole.

    >>> order_bytes(1_000_000)
    4000000
    """
    return rows * np.dtype(_order_type(rows)).itemsize


def _order_type(rows: int) -> type[np.int32 | np.int64]:
    return np.int32 if rows <= 2**31 else np.int64


def _generator(seed: int, environment: str, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(environment.encode()), *numbers])
