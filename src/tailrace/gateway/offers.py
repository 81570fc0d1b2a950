"""Rollouts that wait for clients outside: offered, claimed by `POST /rollouts`, held while their client is heard of.

    claimed ─► waiting, by environment ─► claim ─► told where it is played
    play ─► (claimed here, or in another process) ─► lease: begins anew with each request and its end ─► ended, or lost

A client claims the rollout that has waited longest, and gets its address, its key, its task and its limits. One that
brings a task gets a rollout of it where there is one, and else has it played by a group that has no task yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from tailrace.environments import Offer
from tailrace.environments.outside import AnswerClient
from tailrace.environments.rows import ClientRow, Row, row_as_json
from tailrace.errors import ClientLost, RolloutTimeout
from tailrace.gateway.dialects.protocol import RequestInvalid
from tailrace.records import Json
from tailrace.timeouts import timeout, timeout_at
from tailrace.transport.channels import wait_until

if TYPE_CHECKING:
    from tailrace.gateway.claims import Claim
    from tailrace.gateway.sessions import Session

LONGEST_WAIT_S = 60.0
"""That a client may wait for a rollout in one request."""
_ADDRESSES = ("openai_base_url", "anthropic_base_url", "rollout_url")
"""Fields of what it is answered."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A rollout that nobody has claimed."""

    number: int
    """Of those before it."""
    offer: Offer
    row: Row
    """Of its task."""
    claimed: asyncio.Future[None]
    answer: asyncio.Future[bytes]
    """What its client is answered; empty: it is not played, after all."""

    @property
    def has_task(self) -> bool:
        """Whether nobody needs to bring one."""
        return not isinstance(self.row, ClientRow) or self.row.is_filled

    def tell(self, answer: bytes) -> bool:
        """Once, to whoever has claimed it; False where that client has gone."""
        if not self.answer.done():
            self.answer.set_result(answer)
        return not self.answer.cancelled()


class Offers:
    """Of one gateway."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        """With it clients claim rollouts."""
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self.held = 0
        """Rollouts that clients have now."""
        self.asking = 0
        """Clients that wait for one."""
        self.environments: list[str] = []
        """Whose rollouts are offered, where that is known."""
        self._is_closed = False

    def close(self) -> None:
        """Nothing is offered any more; clients that wait are told so."""
        self._is_closed = True
        self._changed.set()

    @property
    def waiting(self) -> dict[str, int]:
        """Rollouts that nobody has claimed, by environment."""
        return {name: len(queue) for name, queue in self._waiting.items() if queue}

    async def play(self, session: Session, offer: Offer) -> None:
        """Wait until a client has ended a rollout. See `Endpoint.play_outside`."""
        is_told = False
        while not is_told:
            claimed = self.claimed(offer) if offer.tell is None else contextlib.nullcontext(offer.tell)
            async with claimed as tell:
                session.hear()
                is_told = tell(_claim_answer(session, offer))
                if is_told:
                    await _held(session, offer)

    @contextlib.asynccontextmanager
    async def claimed(self, offer: Offer) -> AsyncIterator[AnswerClient]:
        """Offer a rollout, and wait until a client has claimed it. See `Endpoints.claimed`."""
        row_as_json(offer.task)  # one that cannot be told costs its rollout, and no client
        loop = asyncio.get_running_loop()
        waiting = _Waiting(next(self._numbers), offer, offer.task.row, loop.create_future(), loop.create_future())
        queue = self._waiting.setdefault(offer.task.environment, deque())
        queue.append(waiting)
        self._changed.set()
        try:
            try:
                await waiting.claimed
            except asyncio.CancelledError:
                if waiting in queue:
                    queue.remove(waiting)
                raise
            self.held += 1
            try:
                yield waiting.tell
            finally:
                self.held -= 1
        finally:
            waiting.tell(b"")

    def require_key(self, keys: list[str]) -> None:
        """Raise `RequestInvalid` for a client that the run has not told its key."""
        if not any(hmac.compare_digest(key.encode(), self.key.encode()) for key in keys):
            raise RequestInvalid(
                "this needs the run's own key, at the run's own address: gateway.json in the run's folder holds both",
                status=401,
            )

    async def claim(self, claim: Claim) -> bytes | None:
        """The rollout that has waited longest, for one client; None where there is none within `wait_s`.

        Raises `RequestInvalid` for an environment that no rollout will ever be of, a task that it does not take, and
        where the run has ended.
        """
        environment = claim.environment
        if environment is not None and self.environments and environment not in self.environments:
            raise RequestInvalid(
                f"no environment of clients outside is called {environment!r}; there are: "
                f"{', '.join(self.environments)}",
                parameter="environment",
                status=404,
            )
        waiting = await self._awaited(claim)
        while waiting is not None:
            self._waiting[waiting.offer.task.environment].remove(waiting)
            if not waiting.claimed.done():  # it was cancelled this very moment
                if claim.task is not None:
                    self._fill(waiting.row, claim.task)
                waiting.claimed.set_result(None)
                if answer := await waiting.answer:
                    return answer
            waiting = self._next(claim)
        if self._is_closed:
            raise RequestInvalid("the run has ended: it offers no rollout any more", status=410)
        return None

    async def _awaited(self, claim: Claim) -> _Waiting | None:
        """What the claim gets, within `wait_s`."""
        found: _Waiting | None = None

        def is_answered() -> bool:
            nonlocal found
            found = self._next(claim)
            return self._is_closed or found is not None

        self.asking += 1
        try:
            async with timeout(claim.wait_s):
                await wait_until(self._changed, is_answered)
        except TimeoutError:
            pass
        finally:
            self.asking -= 1
        return found

    def _next(self, claim: Claim) -> _Waiting | None:
        """What a claim gets now: of any environment, the one that waits first. None once the run has ended.

        Raises `RequestInvalid` for a task that is brought to rollouts which have theirs, or lacks a column.
        """
        if self._is_closed:
            return None
        wanted = self._waiting if claim.environment is None else {claim.environment}
        queues = [queue for name in wanted if (queue := self._waiting.get(name))]
        firsts = [one for queue in queues if (one := _first(queue, claim.task)) is not None]
        found = min(firsts, key=lambda one: (not one.has_task, one.number), default=None)
        if claim.task is None:
            return found
        if found is None and queues and not any(isinstance(queue[0].row, ClientRow) for queue in queues):
            raise RequestInvalid("the rollouts that wait have tasks of their own: leave `task` out", parameter="task")
        if found is not None and isinstance(found.row, ClientRow) and (lacks := found.row.missing(claim.task)):
            raise RequestInvalid(
                f"a task of {found.offer.task.environment!r} needs a column {lacks!r}", parameter="task"
            )
        return found

    def _fill(self, row: Row, brought: Row) -> None:
        """The rollouts of a group share their row: the others of this one are there for the same task."""
        if isinstance(row, ClientRow) and not row.is_filled:
            row.fill(brought)
            self._changed.set()


def _first(queue: Iterable[_Waiting], brought: Row | None) -> _Waiting | None:
    """For a claim that brings this task, or none: the first that is about it, or else the first without a task.

    One pass, which is short for each: thousands may wait.
    """
    if brought is None:
        return next((one for one in queue if one.has_task), None)
    empty = None
    for one in queue:
        row = one.row
        if isinstance(row, ClientRow):
            if not row.is_filled:
                empty = empty or one
            elif row == brought:
                return one
    return empty


async def _held(session: Session, offer: Offer) -> None:
    """Until its client ends it. Raises `ClientLost`, `RolloutTimeout`."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + offer.limit_s
    while not session.has_ended:
        until_s = min(ends_s, session.heard_s + offer.lease_s)
        try:
            async with timeout_at(until_s):
                await session.ended()
        except TimeoutError:
            now_s = loop.time()
            if now_s >= ends_s:
                raise RolloutTimeout(
                    f"task {offer.task.task_id}: its client has not ended it {offer.limit_s:g} s after claiming it "
                    "(rollouts.timeout_s)"
                ) from None
            if session.turns.running:
                session.hear()  # it waits for an answer
            elif now_s >= session.heard_s + offer.lease_s:
                raise ClientLost(
                    f"task {offer.task.task_id}: the client that claimed it was not heard of for {offer.lease_s:g} s "
                    "(outside_agent(lease_s=...))"
                ) from None


def at_host(answer: bytes, host: str) -> bytes:
    """What a client is answered that knows this machine as `host`."""
    told = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
    for name in _ADDRESSES:
        url = urlsplit(msgspec.json.decode(told[name], type=str))
        told[name] = msgspec.Raw(msgspec.json.encode(url._replace(netloc=f"{host}:{url.port}").geturl()))
    return msgspec.json.encode(told)


def _claim_answer(session: Session, offer: Offer) -> bytes:
    task = offer.task
    answer: dict[str, Json] = {
        "id": session.key,
        "environment": task.environment,
        "task_id": task.task_id,
        "seed": task.seed,
        "task": msgspec.Raw(row_as_json(task)),
        "key": session.key,
        "openai_base_url": session.openai_url,
        "anthropic_base_url": session.root_url,
        "rollout_url": session.path_url,
        "lease_s": offer.lease_s,
        "limits": dict(offer.limits),
    }
    return msgspec.json.encode(answer)
