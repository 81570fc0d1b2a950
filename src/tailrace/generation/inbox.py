"""What waits for the engine's thread, and the one decision it takes before each iteration."""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tailrace.generation.engines.protocol import SampledTokens
from tailrace.records import Completion, GenerationRequest

if TYPE_CHECKING:
    import torch

TensorsOpener: TypeAlias = "Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]"
"""Opens a published model state dict for reading, in the engine's thread."""

ChunkListener: TypeAlias = "Callable[[SampledTokens], None]"
"""Hears of the tokens of a request that goes on, on the event loop that asked for it."""


@dataclass(slots=True, eq=False)
class Call:
    """One `generate` in flight. The chunks belong to the engine's thread, the future to its event loop."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    on_chunk: ChunkListener | None = None
    chunks: list[SampledTokens] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Load:
    """One `load_model_state_dict` in flight."""

    opener: TensorsOpener
    version: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[int]


class Action(enum.Enum):
    """What the engine's thread does next."""

    CLOSE = enum.auto()
    LOAD = enum.auto()
    STEP = enum.auto()
    WAIT = enum.auto()


def next_action(*, closing: bool, loads: int, arrivals: int, engine_has_work: bool) -> Action:
    """Close before load before step; wait when there is nothing to do.

    >>> next_action(closing=False, loads=1, arrivals=9, engine_has_work=True)
    <Action.LOAD: 2>
    """
    if closing:
        return Action.CLOSE
    if loads:
        return Action.LOAD
    if arrivals or engine_has_work:
        return Action.STEP
    return Action.WAIT


@dataclass(slots=True)
class Arrivals:
    """Calls and aborts that came since the last step, in order."""

    calls: list[Call] = field(default_factory=list)
    aborted: list[Call] = field(default_factory=list)


class Inbox:
    """Thread-safe: the event loop puts, the engine's thread takes. Waiting is by condition, never by polling."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrivals = Arrivals()
        self._loads: list[Load] = []
        self._closing = False
        self._failure: Callable[[], Exception] | None = None

    def put_call(self, call: Call) -> None:
        """Hand over a request. Raises the failure once the thread is gone."""
        with self._changed:
            self._require_open()
            self._arrivals.calls.append(call)
            self._changed.notify()

    def put_abort(self, call: Call) -> None:
        """Ask for the end of a request that was handed over before."""
        with self._changed:
            self._arrivals.aborted.append(call)
            self._changed.notify()

    def put_load(self, load: Load) -> None:
        """Hand over a model state dict. Raises the failure once the thread is gone."""
        with self._changed:
            self._require_open()
            self._loads.append(load)
            self._changed.notify()

    def close(self) -> None:
        """Ask the thread to end."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def next_action(self, *, engine_has_work: bool) -> Action:
        """The next thing to do; blocks while there is none."""
        with self._changed:
            while True:
                arrivals = len(self._arrivals.calls) + len(self._arrivals.aborted)
                action = next_action(
                    closing=self._closing,
                    loads=len(self._loads),
                    arrivals=arrivals,
                    engine_has_work=engine_has_work,
                )
                if action is not Action.WAIT:
                    return action
                self._changed.wait()

    def take_arrivals(self) -> Arrivals:
        """Everything that came since the last call."""
        with self._changed:
            arrivals, self._arrivals = self._arrivals, Arrivals()
            return arrivals

    def take_loads(self) -> list[Load]:
        """Every load that waits, oldest version first."""
        with self._changed:
            loads, self._loads = self._loads, []
        return sorted(loads, key=lambda load: load.version)

    def fail(self, failure: Callable[[], Exception]) -> tuple[Arrivals, list[Load]]:
        """Refuse everything from now on with what `failure` makes; what still waited, to be told."""
        with self._changed:
            self._failure = failure
            arrivals, self._arrivals = self._arrivals, Arrivals()
            loads, self._loads = self._loads, []
            return arrivals, loads

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure()
