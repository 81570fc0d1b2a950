"""New weights on their way into the engine: opened and prepared beside generation, so that installing is one copy.

    load_model_state_dict() ──→ staging thread: open, engine.prepare ──→ inbox ──→ engine's thread: copy
                            ←── the version installed, or the error ←── settled ──┘

One model state dict after the other; `router.weights` decides which are sent, and when one that failed is retried.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tailrace.errors import EngineFailed, GenerationError, TailraceError
from tailrace.generation.engine_thread.handover import Staged, Waiter
from tailrace.generation.engine_thread.inbox import Inbox
from tailrace.transport.weights.stores import ModelStateDict

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

TensorsOpener: TypeAlias = "Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]"
"""Opens a published model state dict for reading, in the staging thread, where it is closed, too."""

Prepare: TypeAlias = "Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]"
"""`Engine.prepare`."""


@dataclass(slots=True, eq=False)
class LoadCall:
    """One `load_model_state_dict` in flight."""

    opener: TensorsOpener
    version: int
    waiter: Waiter[int]
    is_withdrawn: bool = False
    """Its caller went away."""


class _Withdrawn(Exception):
    """Its caller went away."""


class Stager:
    """The staging thread and what waits for it."""

    def __init__(self, inbox: Inbox) -> None:
        """`start` begins, `fail` ends."""
        self.loads_total = 0
        """Model state dicts installed."""
        self._inbox = inbox
        self._prepare: Prepare = lambda tensors: tensors
        self._installed = 0
        self._loads: deque[LoadCall] = deque()  # the first one is being worked on
        self._staged: Staged | None = None
        self._failure: Callable[[], Exception] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tailrace-staging", daemon=True)

    def start(self, version: int, prepare: Prepare) -> None:
        """The engine is built and began with `version`, which a trainer's weights of that version replace."""
        self._installed, self._prepare = version - 1, prepare
        self._thread.start()

    def put(self, load: LoadCall) -> None:
        """Hand over a load. Raises the failure once the engine is gone."""
        with self._changed:
            if self._failure is not None:
                raise self._failure()
            self._loads.append(load)
            self._changed.notify()

    def withdraw(self, load: LoadCall) -> None:
        """Its caller went away: it is not installed, unless the engine's thread has it already."""
        with self._changed:
            load.is_withdrawn = True
            staged = self._staged if self._loads and self._loads[0] is load else None
            if staged is not None and self._inbox.withdraw(staged):
                staged.settle(_Withdrawn())

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Refuse everything from now on, fail what waits, and end the thread after what it is doing."""
        with self._changed:
            self._failure = failure
            for load in self._loads:
                load.waiter.fail(failure())
            if self._staged is not None:
                self._staged.settle(failure())
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, or `timeout_s`: opening a model state dict may block."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        """Waits for loads; ends with `fail`."""
        while (load := self._next_load()) is not None:
            try:
                if load.version >= self._installed:  # the same again: of a trainer that was started again
                    self._install(load)
            except _Withdrawn:
                pass
            except Exception as error:  # noqa: BLE001 - raised to its caller; the old weights are whole
                self._load_failed(load, error)
            else:
                load.waiter.resolve(self._installed)
            with self._changed:
                self._loads.popleft()

    def _next_load(self) -> LoadCall | None:
        """The oldest that waits; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._failure)
            return None if self._failure else self._loads[0]

    def _install(self, load: LoadCall) -> None:
        """Open, prepare, hand over; waits until it is installed. Raises what went wrong."""
        if load.is_withdrawn:
            raise _Withdrawn
        with load.opener() as tensors:
            # A store may lend newer weights than those asked for: their tokens are of the newer policy.
            version = tensors.version if isinstance(tensors, ModelStateDict) else load.version
            prepared = self._prepare(tensors)
            del tensors
            staged = Staged(prepared, version)
            self._hand_over(load, staged)
            staged.wait()
            self._staged = None
            del prepared  # here, and not in the engine's thread: freeing takes time
        if staged.error is not None:
            raise staged.error
        self._installed = version
        self.loads_total += 1

    def _hand_over(self, load: LoadCall, staged: Staged) -> None:
        with self._changed:
            if load.is_withdrawn:
                raise _Withdrawn
            if self._failure:
                raise self._failure()
            self._inbox.put_staged(staged)
            self._staged = staged

    def _load_failed(self, load: LoadCall, error: Exception) -> None:
        if not isinstance(error, EngineFailed):
            _log.debug("version %d was not installed", load.version, exc_info=error)
        load.waiter.fail(error if isinstance(error, TailraceError) else _as_load_error(load.version, error))


def _as_load_error(version: int, error: Exception) -> GenerationError:
    """Of Tailrace's tree: any other error would count as the engine's end."""
    failure = GenerationError(f"version {version} was not installed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
