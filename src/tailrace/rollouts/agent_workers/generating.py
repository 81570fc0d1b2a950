"""`Generate` in an agent worker: every request is a call of the orchestrator's, which alone knows the generators."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from tailrace.records import Completion, Generate, GenerationRequest, OnChunk
from tailrace.rollouts.agent_workers.messages import Answer, AnswerChunk, AnswerError, Ask, Withdraw


@dataclass(frozen=True, slots=True)
class _Call:
    answered: asyncio.Future[Completion]
    on_chunk: OnChunk | None


class AskedGenerate(Generate):
    """Asks over a connection; `answered` takes what comes back."""

    def __init__(self, send: Callable[[Ask | Withdraw], None]) -> None:
        self._send = send
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()

    @override
    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """For the rollout that owns the request."""
        return await self._ask(request.owner or "", request, on_chunk)

    def of(self, key: str) -> Generate:
        """For requests without an owner, of this score."""
        return partial(self._ask, key)

    async def _ask(self, key: str, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        call_id, call = next(self._ids), _Call(asyncio.get_running_loop().create_future(), on_chunk)
        self._calls[call_id] = call
        self._send(Ask(call_id=call_id, key=key, request=request, wants_chunks=on_chunk is not None))
        try:
            return await call.answered
        except BaseException as error:
            # Cancelled, or `on_chunk` raised; where the orchestrator failed it, it is closed.
            if self._calls.get(call_id) is call:
                has_enough = not isinstance(error, asyncio.CancelledError)
                self._send(Withdraw(call_id=call_id, key=key, has_enough=has_enough))
            raise
        finally:
            self._calls.pop(call_id, None)

    def answered(self, answer: Answer | AnswerChunk | AnswerError) -> None:
        """What the orchestrator says of a request; of one that was withdrawn nothing is heard."""
        call = self._calls.get(answer.call_id)
        if call is None or call.answered.done():
            return
        match answer:
            case AnswerChunk():
                self._deliver(call, answer.chunk)
            case Answer():
                del self._calls[answer.call_id]
                call.answered.set_result(answer.completion)
            case AnswerError():
                del self._calls[answer.call_id]
                call.answered.set_exception(answer.failure.error())

    def _deliver(self, call: _Call, chunk: Completion) -> None:
        """A listener that raises fails its own call alone."""
        try:
            if call.on_chunk is not None:
                call.on_chunk(chunk)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            call.answered.set_exception(error)
