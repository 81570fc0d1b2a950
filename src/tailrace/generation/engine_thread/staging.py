"""New weights on their way into the engine: opened and prepared beside generation, so that installing is one copy.

    load_model_state_dict() ──→ staging thread: newest? open, engine.prepare ──→ inbox ──→ engine's thread: copy
                            ←── the version really installed ──────────────────←── installed, or the error

Loads that overlap coalesce: the newest version is tried, and older callers learn what was installed in its stead. One
that fails is tried again, each pause twice the last; then its caller is told, and the next newest has its turn.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tailrace.errors import EngineFailed, GenerationError, TailraceError
from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.inbox import Inbox, Waiter
from tailrace.transport.weights.stores import ModelStateDict

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

TensorsOpener: TypeAlias = "Callable[[], AbstractContextManager[Mapping[str, torch.Tensor]]]"
"""Opens a published model state dict for reading, in the staging thread, where it is closed, too."""

Prepare: TypeAlias = "Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]"
"""`Engine.prepare`."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadCall:
    """One `load_model_state_dict` in flight."""

    opener: TensorsOpener
    version: int
    waiter: Waiter[int]


class Staged:
    """A model state dict that lies ready. The engine's thread installs it and says how that went."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.tensors, self.version = tensors, version
        self.error: Exception | None = None
        self._settled = threading.Event()

    def settle(self, error: Exception | None = None) -> None:
        """The tensors are not needed any more: installed, or not, and why."""
        self.error, self.tensors = error, {}
        self._settled.set()

    def wait(self) -> None:
        """Until it is settled."""
        self._settled.wait()


@dataclass(slots=True)
class LoadStatistics:
    """Of all loads since the start."""

    loads_total: int = 0
    failed_attempts_total: int = 0
    error: str = ""
    """Of the last attempt, where that failed."""


class _Superseded(Exception):
    """A newer model state dict came before this one was installed."""


class Stager:
    """The staging thread and what waits for it."""

    def __init__(self, inbox: Inbox, policy: WeightPolicy) -> None:
        """`start` begins, `fail` ends."""
        self.statistics = LoadStatistics()
        self._inbox, self._policy = inbox, policy
        self._prepare: Prepare = lambda tensors: tensors
        self._installed = 0
        self._waiting: list[LoadCall] = []
        self._staged: Staged | None = None
        self._failure: Callable[[], Exception] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tailrace-staging", daemon=True)

    def start(self, version: int, prepare: Prepare) -> None:
        """The engine is built and has `version` installed."""
        self._installed, self._prepare = version, prepare
        self._thread.start()

    def put(self, load: LoadCall) -> None:
        """Hand over a load. Raises the failure once the engine is gone."""
        with self._changed:
            if self._failure is not None:
                raise self._failure()
            self._waiting.append(load)
            staged = self._staged
            self._changed.notify()
        if staged is not None and load.version > staged.version and self._inbox.withdraw(staged):
            staged.settle(_Superseded())

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Refuse everything from now on, tell who waits, and end the thread after what it is at."""
        with self._changed:
            self._failure = failure
            waiting, self._waiting = self._waiting, []
            staged = self._staged
            self._changed.notify()
        for load in waiting:
            load.waiter.fail(failure())
        if staged is not None:
            staged.settle(failure())

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, but not for ever: opening a model state dict is another part's code."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        """Waits for loads; ends with `fail`."""
        attempt = 0
        while True:
            with self._changed:
                while not (self._waiting or self._failure):
                    self._changed.wait()
                if self._failure:
                    return
                newest = max(self._waiting, key=lambda load: load.version)
            if newest.version <= self._installed:
                self._resolve()
                continue
            try:
                self._stage(newest)
            except _Superseded:
                attempt = 0
            except Exception as error:  # noqa: BLE001 - told to its caller; the old weights are whole
                attempt += 1
                self._attempt_failed(newest, error, attempt)
                attempt = 0 if newest not in self._waiting else attempt
            else:
                attempt = 0
                self._resolve()

    def _stage(self, newest: LoadCall) -> None:
        """Open, read ahead, hand over; waits until it is installed. Raises what went wrong."""
        with newest.opener() as tensors:
            # A store may lend newer weights than those asked for: their tokens are of the newer policy.
            version = tensors.version if isinstance(tensors, ModelStateDict) else newest.version
            prepared = self._prepare(tensors)
            staged = Staged(prepared, version)
            del tensors
            with self._changed:
                if self._failure:
                    return
                self._staged = staged
            self._inbox.put_staged(staged)
            staged.wait()
            self._staged = None
            del prepared  # here, and not in the engine's thread: freeing takes time
        if staged.error is not None:
            raise staged.error
        self._installed = version
        self.statistics.loads_total += 1
        self.statistics.error = ""

    def _attempt_failed(self, load: LoadCall, error: Exception, attempt: int) -> None:
        """Wait before the next attempt, or give up on this version. A newer one that comes is tried at once."""
        if isinstance(error, EngineFailed) or self._failure:
            return
        self.statistics.failed_attempts_total += 1
        self.statistics.error = f"version {load.version}: {type(error).__name__}: {error}"
        _log.warning(
            "version %d was not installed (attempt %d of %d), version %d goes on serving: %s",
            *(load.version, attempt, self._policy.attempts, self._installed, error),
        )
        if attempt >= self._policy.attempts:
            self._give_up(load.version, error)
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or max(one.version for one in self._waiting) > load.version,
                timeout=self._policy.backoff_s * 2 ** (attempt - 1),
            )

    def _give_up(self, version: int, error: Exception) -> None:
        with self._changed:
            told = [load for load in self._waiting if load.version == version]
            self._waiting = [load for load in self._waiting if load.version != version]
        failure = error if isinstance(error, TailraceError) else _as_load_error(version, error)
        for load in told:
            load.waiter.fail(failure)

    def _resolve(self) -> None:
        """Tell everyone who asked for no more than what is installed."""
        with self._changed:
            told = [load for load in self._waiting if load.version <= self._installed]
            self._waiting = [load for load in self._waiting if load.version > self._installed]
        for load in told:
            load.waiter.resolve(self._installed)


def _as_load_error(version: int, error: Exception) -> GenerationError:
    """Of our own tree: elsewhere any other error would count as the engine's end."""
    failure = GenerationError(f"version {version} was not installed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
