"""One turn that a client asks for: sampled once, however often it is asked for again.

    request ─► Turn (a task) ─► the policy ─► text or tokens*, then an Answer or a Failure
    retry ────┘ joins it, running or done

A turn that nobody waits for any more is cancelled: at once, or after a moment where its client is one that retries.
Nothing of it is recorded then, so that whoever asks again goes on with the same branch; the rollout's turn is spent.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from tailrace.errors import BudgetExceeded, EngineFailed, EnvironmentFailed, RequestRefused, RolloutError
from tailrace.gateway.dialects.protocol import Answer, Failure, ReplyUpdate, RequestInvalid
from tailrace.records import Completion, FinishReason, Reply

if TYPE_CHECKING:
    from tailrace.gateway.sessions import Session

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""How long OpenAI's and Anthropic's clients wait at most after their first attempt, their second one, ...; the last of
these after all further ones."""
SPARE_S = 2.5
"""Seconds beside that pause in which a client that retries asks again, after its connection broke."""
_REMEMBERED = 8
"""Turns of a rollout that have ended and whose answers are kept for a retry."""

_logger = logging.getLogger(__name__)


class Repeatable(msgspec.Struct, frozen=True):
    """What tells a retry from a new request."""

    body: bytes
    """Digest of path and body."""
    idempotency_key: str | None = None
    attempt: int | None = None
    """From 0 on, where the client counts them."""

    @property
    def may_be_retried(self) -> bool:
        """Whether its client would say that it asks again."""
        return self.idempotency_key is not None or self.attempt is not None


class Turn:
    """An answer that is being sampled, or was."""

    def __init__(self, session: Session, ask: Ask, repeatable: Repeatable) -> None:
        self.answer_id, self.created_s = uuid.uuid4().hex, int(time.time())
        self.heard: list[ReplyUpdate] = []
        """Of the reply, as far as it is known and streamed."""
        self.outcome: Answer | Failure | None = None
        self.is_delivered = False
        """A client was sent all of the answer."""
        self._asks_on = session.told_of_no_budget
        self.repeatable, self.attempt = repeatable, repeatable.attempt or 0
        self._session, self._ask = session, ask
        self._clients = 0
        self._giving_up: asyncio.TimerHandle | None = None
        """Cancels it, unless a client comes back before."""
        self._waiters: list[asyncio.Future[bool]] = []
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), name=f"turn {self.answer_id}", context=session.context.copy())
        self._task.add_done_callback(self._ended)

    @property
    def is_worth_joining(self) -> bool:
        """Whether a retry gets from it what it would get from a new turn."""
        return not isinstance(self.outcome, Failure) and not self._task.cancelling()

    @property
    def is_missed(self) -> bool:
        """Whether nobody was sent its answer, or waits for it."""
        return not self.is_delivered and not self._clients

    def was_sent(self) -> None:
        """A client was sent all of its answer."""
        self.is_delivered = True
        if isinstance(self.outcome, Answer) and self.outcome.reply is NOTHING:
            self._session.told_of_no_budget = True

    def join(self) -> None:
        """One more client waits for it."""
        self._clients += 1
        if self._giving_up is not None:
            self._giving_up.cancel()

    def leave(self) -> None:
        """A client does not wait for it any more."""
        self._clients -= 1
        if self._clients or self._task.done():
            return
        if self.repeatable.may_be_retried:
            pause_s = _PAUSES_S[min(self.attempt, len(_PAUSES_S) - 1)]
            self._giving_up = self._task.get_loop().call_later(pause_s + SPARE_S, self._task.cancel)
        else:
            self._task.cancel()

    def cancel(self) -> None:
        """Nothing more is sampled for it."""
        self._task.cancel()

    async def changed(self, timeout_s: float | None = None) -> bool:
        """Wait until there is more to say, or the outcome, or a call of `wake`; False where `timeout_s` has passed."""
        if self.outcome is not None:
            return True
        loop = self._task.get_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(waiter)
        timer = None if timeout_s is None else loop.call_later(timeout_s, _resolve, waiter, False)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wake(self) -> None:
        """Let everyone who waits look again."""
        for waiter in self._waiters:
            _resolve(waiter, True)
        self._waiters.clear()

    def on_end(self, call: Callable[[Turn], None]) -> None:
        """Call it once there is an outcome."""
        self._task.add_done_callback(lambda _: call(self))

    async def _run(self) -> None:
        session = self._session
        try:
            self.outcome = await self._ask(self)
            session.told_of_no_budget = False  # what was told was of another prompt
        except BudgetExceeded as error:
            self.outcome = self._stopped(session, error)
        except RequestInvalid as error:
            self.outcome = error.failure
        except (RequestRefused, EnvironmentFailed, ValueError) as error:
            self.outcome = Failure(status=400, message=str(error))
        except EngineFailed as error:
            session.engine_failure = error
            self.outcome = Failure(status=503, message=str(error))
        except RolloutError as error:
            self.outcome = Failure(status=503, message=str(error))
        except Exception:
            _logger.exception("a turn of the gateway failed")
            self.outcome = Failure(status=500, message="Tailrace failed at this request; its log says how")

    def _stopped(self, session: Session, error: BudgetExceeded) -> Answer | Failure:
        """No budget: a reply that says nothing, or a refusal."""
        session.lacks_budget(error)
        refusal = session.refusal(error, asks_on=self._asks_on)
        return refusal or Answer(reply=NOTHING, answer_id=self.answer_id, created_s=self.created_s, prompt_tokens=0)

    def hear(self, more: ReplyUpdate) -> None:
        """More of its reply."""
        self.heard.append(more)
        self.wake()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self.outcome is None:  # cancelled
            self.outcome = Failure(status=410, message="this request was cancelled: its rollout has ended")
        self.wake()


Ask: TypeAlias = Callable[[Turn], Awaitable[Answer]]
"""What a turn is: asks a policy, and lets the turn hear what is known already."""


class Turns:
    """Those of one rollout: what runs, and what a retry may still ask for."""

    def __init__(self) -> None:
        self.running: set[Turn] = set()
        self._retriable: dict[Turn, None] = {}
        """In the order in which they began: all that run, and the latest that have ended."""
        self._over: list[Turn] = []
        """Those of them that have ended, in the order in which they did."""

    def begin(self, session: Session, ask: Ask, repeatable: Repeatable) -> Turn:
        """A turn of its own."""
        turn = Turn(session, ask, repeatable)
        self.running.add(turn)
        turn.on_end(self.running.discard)
        turn.on_end(lambda _: session.hear())  # until now it was waited for
        if repeatable.may_be_retried:
            self._retriable[turn] = None
            turn.on_end(self._keep)
        return turn

    def retried(self, repeatable: Repeatable) -> Turn | None:
        """The turn that a request asks for again; None: it is a new one.

        Raises `RequestInvalid` where its idempotency key is that of another request.
        """
        turn = self._repeated(repeatable) if repeatable.idempotency_key is None else self._of_key(repeatable)
        if turn is None or not turn.is_worth_joining:
            return None
        turn.attempt = repeatable.attempt or 0
        return turn

    def cancel(self) -> None:
        """Nothing more is sampled."""
        for turn in list(self.running):
            turn.cancel()

    async def ended(self) -> None:
        """Wait for those that were cancelled: a moment, since what runs in them is none of a user's."""
        while self.running:
            await next(iter(self.running)).changed()
            await asyncio.sleep(0)

    def _keep(self, turn: Turn) -> None:
        """It has ended, and may be asked for again for a while: the longest where nobody got its answer."""
        self._over.append(turn)
        if len(self._over) > _REMEMBERED:
            useless = (one for one in self._over if one.is_delivered or not one.is_worth_joining)
            forgotten = next(useless, self._over[0])
            self._over.remove(forgotten)
            del self._retriable[forgotten]

    def _of_key(self, repeatable: Repeatable) -> Turn | None:
        """The turn that a request repeats by its idempotency key. Raises `RequestInvalid` as `retried` does."""
        same = [turn for turn in self._retriable if turn.repeatable.idempotency_key == repeatable.idempotency_key]
        if any(turn.repeatable.body != repeatable.body for turn in same):
            raise RequestInvalid("this Idempotency-Key was sent with another request", status=422)
        return next((turn for turn in same if turn.is_worth_joining), None)

    def _repeated(self, repeatable: Repeatable) -> Turn | None:
        """The turn that a request repeats by its count of attempts.

        Agents ask the same several times over, to have several answers: of such turns it is the newest whose answer
        nobody has got, and where all have theirs, another one than these.
        """
        if not repeatable.attempt:
            return None
        earlier = [
            turn
            for turn in self._retriable
            if turn.repeatable.idempotency_key is None
            and turn.repeatable.body == repeatable.body
            and turn.attempt < repeatable.attempt
        ]
        missed = [turn for turn in earlier if turn.is_missed and turn.is_worth_joining]
        if missed:
            return missed[-1]
        return earlier[0] if len(earlier) == 1 else None


def _resolve(waiter: asyncio.Future[bool], has_changed: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_changed)


NOTHING = Reply(
    message={"role": "assistant", "content": ""},
    finish_reason=FinishReason.LENGTH,
    completion=Completion(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        policy_versions=np.empty(0, np.int32),
        finish_reason=FinishReason.LENGTH,
    ),
)
"""The answer of whoever asks without budget, and did not know."""
