"""The loop around an engine: one decision, one action, repeated. Synchronous, and owned by the engine's thread.

    inbox ──→ decide ──→ close | reset | load | step ──→ chunks and completions, to the callers' event loops

Requests are admitted before every step, so that a freed slot is taken in the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from tailrace.errors import EngineFailed, RequestRefused
from tailrace.generation.completions import as_chunk, assembled, finished, work_of
from tailrace.generation.decisions import (
    DEFAULT_WEIGHT_POLICY,
    Close,
    Decision,
    EngineState,
    Load,
    Reset,
    Step,
    WeightPolicy,
)
from tailrace.generation.engine_thread.delivery_queue import Delivery, DeliveryQueue
from tailrace.generation.engine_thread.inbox import Call, Inbox, Interruption, RecordedExperts, Taken
from tailrace.generation.engines.protocol import Engine, SampledTokens
from tailrace.records import Completion, FinishReason
from tailrace.tracing.phases import phase


@dataclass(slots=True)
class _Interrupting:
    """Requests that were asked for and have not all left the engine."""

    interruption: Interruption
    left: set[str]
    count: int


@dataclass(frozen=True, slots=True)
class _Sampled(Delivery):
    """What one step sampled of a request. A listener that raises fails its own request alone."""

    call: Call
    sampled: SampledTokens
    completion: Completion | None = None
    """Where it ended."""

    @override
    def deliver(self) -> int:
        future, on_chunk = self.call.waiter.future, self.call.on_chunk
        if future.done():
            return 0
        try:
            if on_chunk is not None and len(self.sampled.token_ids):
                on_chunk(as_chunk(self.sampled))
        except Exception as error:  # noqa: BLE001 - raised to the caller
            future.set_exception(error)
        else:
            if self.completion is not None:
                future.set_result(self.completion)
        return work_of(self.completion)


@dataclass(frozen=True, slots=True)
class _Interrupted(Delivery):
    """All requests of an interruption were handed back."""

    interruption: Interruption
    count: int

    @override
    def deliver(self) -> int:
        if not self.interruption.done.future.done():
            self.interruption.done.future.set_result(self.count)
        return 1


class EngineLoop:
    """Serves an inbox from an engine.

    `run` is its life; a test takes the iterations one by one, with `inbox.decide` and `act`.
    """

    def __init__(self, engine: Engine, inbox: Inbox, policy: WeightPolicy = DEFAULT_WEIGHT_POLICY):
        self._engine, self._inbox, self._policy = engine, inbox, policy
        self._taken = Taken()
        """From the inbox, and perhaps not passed on yet."""
        self._calls: dict[str, Call] = {}
        self._interrupting: list[_Interrupting] = []
        self._queues: dict[asyncio.AbstractEventLoop, DeliveryQueue] = {}
        self._notifications: list[Callable[[], None]] = []
        """Called once the statistics are those after this iteration."""
        self._is_reset = False
        self.limits = engine.limits
        self.statistics = engine.statistics()

    @property
    def state(self) -> EngineState:
        """What the next decision needs to know."""
        return EngineState(has_work=self._engine.has_work, is_reset=self._is_reset)

    def run(self) -> None:
        """Waits for something to do; returns when asked to close. Raises what the engine raised."""
        while self.act(self._inbox.decide(self.state, self._policy, waits=True)):
            pass

    def act(self, decision: Decision) -> bool:
        """Carry it out; whether to go on."""
        match decision:
            case Close():
                return False
            case Step(admit=admit):
                self._step(admit)
            case Reset():
                self._change_weights(self._reset)
            case Load():
                self._change_weights(self._load)
        self.statistics = self._engine.statistics()
        notifications, self._notifications = self._notifications, []
        for notify in notifications:
            notify()
        return True

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Fail what is in flight, what waits, and every later call. From any thread: the engine's may be stuck."""
        fail_inbox(self._inbox, failure)
        _fail_taken(self._taken, failure)
        for call in [*self._calls.values()]:
            call.waiter.fail(failure())
        for interrupting in [*self._interrupting]:
            interrupting.interruption.done.fail(failure())

    # --- requests ------------------------------------------------------------------------------------------------

    def _step(self, admit: bool) -> None:
        self._taken = self._inbox.take(admit=admit)
        self._pass_on(self._taken)
        self._taken = Taken()
        if self._engine.has_work:
            self._is_reset = False
            self._resolve(self._engine.step())
        self._settle_interruptions()

    def _pass_on(self, taken: Taken) -> None:
        if taken.seed is not None:
            self._engine.reseed(taken.seed)
        for call in taken.calls:
            call.waited_s = time.perf_counter() - call.arrived_s
            try:
                if (done := finished(call.request, self._engine.limits)) is not None:
                    call.waiter.resolve(done)
                    continue
                self._engine.add(call.request)
            except RequestRefused as error:
                call.waiter.fail(error)
            else:
                self._calls[call.request.request_id] = call
        for call in taken.aborted:
            if self._calls.get(call.request.request_id) is call:
                self._engine.abort(call.request.request_id)
        for interruption in taken.interruptions:
            self._interrupt(interruption)

    def _resolve(self, chunks: list[SampledTokens]) -> None:
        """Hand chunks and completions to their event loops: one wake-up each, and pauses where there are many."""
        deliveries: dict[asyncio.AbstractEventLoop, list[_Sampled]] = defaultdict(list)
        for chunk in chunks:
            call = self._calls[chunk.request_id]
            call.chunks.append(chunk)
            if chunk.finish_reason is None:
                if call.on_chunk is not None:
                    deliveries[call.waiter.loop].append(_Sampled(call, chunk))
                continue
            completion = assembled(call.request.prefix, call.chunks, chunk.finish_reason, waited_s=call.waited_s)
            if chunk.routed_experts is not None:
                call.experts.append(RecordedExperts(chunk.routed_experts_start, chunk.routed_experts))
            completion.metrics["in_flight"] = float(len(self._calls))
            del self._calls[chunk.request_id]
            deliveries[call.waiter.loop].append(_Sampled(call, chunk, completion))
        for loop, delivered in deliveries.items():
            self._notify(loop, delivered)

    def _notify(self, loop: asyncio.AbstractEventLoop, deliveries: Sequence[Delivery]) -> None:
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = DeliveryQueue(loop)
        self._notifications.append(partial(queue.put, deliveries))

    # --- interruption --------------------------------------------------------------------------------------------

    def _interrupt(self, interruption: Interruption) -> None:
        """Abort requests; their last chunks come with the next step. Those that the engine was not given go back."""
        ids = interruption.request_ids
        wanted = {name for name in self._calls if ids is None or name in ids}
        for name in wanted:
            self._engine.abort(name)
        waiting = self._inbox.take_calls(ids)
        for call in waiting:
            call.waiter.resolve(assembled(call.request.prefix, [], FinishReason.ABORTED))
        self._interrupting.append(_Interrupting(interruption, wanted, len(wanted) + len(waiting)))

    def _settle_interruptions(self) -> None:
        for interrupting in self._interrupting:
            interrupting.left &= self._calls.keys()
            if not interrupting.left:
                interruption = interrupting.interruption
                self._notify(interruption.done.loop, [_Interrupted(interruption, interrupting.count)])
        self._interrupting = [interrupting for interrupting in self._interrupting if interrupting.left]

    # --- weights -------------------------------------------------------------------------------------------------

    def _change_weights(self, change: Callable[[], None]) -> None:
        """Reset or load. An error is that of the load, and the old weights keep serving."""
        try:
            with phase("change_weights", track="weights"):
                change()
        except EngineFailed:
            raise
        except Exception as error:  # noqa: BLE001 - raised to the caller of the load, who tries again
            staged = self._inbox.take_staged()
            if staged is not None:
                self._notifications.append(partial(staged.settle, error))

    def _reset(self) -> None:
        self._engine.reset_prefix_cache(preempt_running=self._policy.kv_cache == "recompute")
        self._is_reset = True

    def _load(self) -> None:
        staged = self._inbox.take_staged()
        if staged is None:  # it was withdrawn after the decision
            return
        try:
            self._engine.load_model_state_dict(staged.tensors, staged.version)
        except EngineFailed:
            raise
        except Exception as error:  # noqa: BLE001 - raised to the caller of the load, who tries again
            self._notifications.append(partial(staged.settle, error))
        else:
            self._notifications.append(staged.settle)


def fail_inbox(inbox: Inbox, failure: Callable[[], Exception]) -> None:
    """Fail what waits in it and every later call."""
    _fail_taken(inbox.fail(failure), failure)


def _fail_taken(taken: Taken, failure: Callable[[], Exception]) -> None:
    for call in taken.calls:
        call.waiter.fail(failure())
    for interruption in taken.interruptions:
        interruption.done.fail(failure())
