"""What waits for the engine's thread. The event loop and the staging thread put, the engine's thread takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.generation.decisions import Decision, EngineState, InboxState, Wait, WeightPolicy, decide
from tailrace.generation.engine_thread.handover import Staged, Waiter
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.records import Completion, ExpertArray, GenerationRequest, OnChunk


@dataclass(frozen=True, slots=True, eq=False)
class RecordedExperts:
    """Routed experts of a stretch of prompt and completion, from `start` on."""

    start: int
    array: ExpertArray


@dataclass(slots=True, eq=False)
class Call:
    """One `generate` in flight. All but the waiter belongs to the engine's thread."""

    request: GenerationRequest
    waiter: Waiter[Completion]
    on_chunk: OnChunk | None = None
    chunks: list[SampledTokens] = field(default_factory=list)
    experts: list[RecordedExperts] = field(default_factory=list)
    arrived_s: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0
    """Before the engine was given the request."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """Hand requests back to their callers as `ABORTED`, with the tokens they have."""

    done: Waiter[int]
    request_ids: frozenset[str] | None = None
    """All where None."""


@dataclass(slots=True)
class Taken:
    """What the engine's thread has to pass on before its next step, in order."""

    calls: list[Call] = field(default_factory=list)
    aborted: list[Call] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    seed: int | None = None
    """For the calls, and later ones."""


class Inbox:
    """Thread-safe. Waiting is by condition, never by polling."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._aborted: list[Call] = []
        self._interruptions: list[Interruption] = []
        self._seed: int | None = None
        self._staged: Staged | None = None
        self._closing = False
        self._failure: Callable[[], Exception] | None = None

    async def generate(
        self,
        request: GenerationRequest,
        on_chunk: OnChunk | None = None,
        recorded: list[RecordedExperts] | None = None,
    ) -> Completion:
        """Hand over a request and wait for its completion; abort it when cancelled, or when `on_chunk` raises.

        What the engine recorded beside the tokens is added to `recorded`. Raises the failure once the thread is gone.
        """
        call = Call(request, Waiter.on_current_loop(), on_chunk, experts=[] if recorded is None else recorded)
        with self._changed:
            self._require_open()
            self._calls.append(call)
            self._changed.notify()
        try:
            return await call.waiter.future
        except BaseException:
            self._abort(call)
            raise

    def put_staged(self, staged: Staged) -> None:
        """Hand over a model state dict that lies ready. Raises the failure once the thread is gone."""
        with self._changed:
            self._require_open()
            self._staged = staged
            self._changed.notify()

    def withdraw(self, staged: Staged) -> bool:
        """Take it back, unless the thread has it already."""
        with self._changed:
            if self._staged is not staged:
                return False
            self._staged = None
            return True

    def put_interruption(self, interruption: Interruption) -> None:
        """Ask for requests back. Raises the failure once the thread is gone."""
        with self._changed:
            self._require_open()
            self._interruptions.append(interruption)
            self._changed.notify()

    def put_seed(self, seed: int) -> None:
        """Ask for random streams that begin here. Raises the failure once the thread is gone."""
        with self._changed:
            self._require_open()
            self._seed = seed
            self._changed.notify()

    def close(self) -> None:
        """Ask the thread to end."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def decide(self, engine: EngineState, policy: WeightPolicy, *, waits: bool = False) -> Decision:
        """What to do now; blocks while there is nothing if it `waits`."""
        with self._changed:
            while isinstance(decision := decide(self._state(), engine, policy), Wait) and waits:
                self._changed.wait()
            return decision

    def take(self, *, admit: bool) -> Taken:
        """Everything to pass on; without `admit` the requests stay."""
        with self._changed:
            calls: list[Call] = []
            if admit:
                calls, self._calls = self._calls, calls
            taken = Taken(calls, self._aborted, self._interruptions, self._seed)
            self._aborted, self._interruptions, self._seed = [], [], None
            return taken

    def take_calls(self, request_ids: frozenset[str] | None) -> list[Call]:
        """Requests that the engine was not given, all or those of these ids."""
        with self._changed:
            taken: list[Call] = []
            kept: list[Call] = []
            for call in self._calls:
                is_taken = request_ids is None or call.request.request_id in request_ids
                (taken if is_taken else kept).append(call)
            self._calls = kept
            return taken

    def take_staged(self) -> Staged | None:
        """The model state dict that lies ready."""
        with self._changed:
            staged, self._staged = self._staged, None
            return staged

    def fail(self, failure: Callable[[], Exception]) -> Taken:
        """Refuse everything from now on with what `failure` makes; returns what still waited."""
        with self._changed:
            self._failure = failure
            taken = Taken(self._calls, self._aborted, self._interruptions)
            self._calls, self._aborted, self._interruptions = [], [], []
            return taken

    def _abort(self, call: Call) -> None:
        with self._changed:
            if call in self._calls:
                self._calls.remove(call)
                return
            self._aborted.append(call)
            self._changed.notify()

    def _state(self) -> InboxState:
        return InboxState(
            closing=self._closing,
            staged_version=None if self._staged is None else self._staged.version,
            arrivals=len(self._calls),
            aborts=len(self._aborted) + len(self._interruptions) + (self._seed is not None),
        )

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure()
