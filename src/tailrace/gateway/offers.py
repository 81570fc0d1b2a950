"""Rollouts that wait for clients outside: offered, claimed by `POST /rollouts`, held while their client is heard of.

    play ─► waiting, by environment ─► claim ─► lease: each request begins it anew ─► ended, or lost

A client claims the rollout that has waited longest, and gets its address, its key, its task and its limits.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tailrace.environments import Offer
from tailrace.environments.rows import row_as_json
from tailrace.errors import ClientLost, RolloutTimeout
from tailrace.gateway.dialects.protocol import RequestInvalid
from tailrace.records import Json
from tailrace.transport.channels import wait_until

if TYPE_CHECKING:
    from tailrace.gateway.sessions import Session

LONGEST_WAIT_S = 60.0
"""That a client may wait for a rollout in one request."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A rollout that nobody has claimed."""

    number: int
    """Of those before it."""
    session: Session
    offer: Offer
    row: bytes
    """Of its task, as JSON."""
    claimed: asyncio.Future[None]


class Offers:
    """Of one gateway."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        """With it clients claim rollouts."""
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self.claims = 0
        """Rollouts that were claimed, in all."""
        self.held = 0
        """Rollouts that clients have now."""
        self.asking = 0
        """Clients that wait for one."""
        self.environments: list[str] = []
        """Whose rollouts are offered, where that is known."""

    @property
    def waiting(self) -> dict[str, int]:
        """Rollouts that nobody has claimed, by environment."""
        return {name: len(queue) for name, queue in self._waiting.items() if queue}

    async def play(self, session: Session, offer: Offer) -> None:
        """Offer a rollout, and wait until a client has ended it. See `Endpoint.play_outside`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(next(self._numbers), session, offer, row_as_json(offer.task), loop.create_future())
        queue = self._waiting.setdefault(offer.task.environment, deque())
        queue.append(waiting)
        self._changed.set()
        try:
            await waiting.claimed
        finally:
            if waiting in queue:
                queue.remove(waiting)
        self.held += 1
        try:
            await _held(session, offer)
        finally:
            self.held -= 1

    def require_key(self, keys: list[str]) -> None:
        """Raise `RequestInvalid` for a client that the run has not told its key."""
        if not any(hmac.compare_digest(key.encode(), self.key.encode()) for key in keys):
            raise RequestInvalid("this needs the run's own key: gateway.json in the run's folder holds it", status=401)

    async def claim(self, environment: str | None, wait_s: float) -> dict[str, Json] | None:
        """The rollout that has waited longest, for one client; None where there is none within `wait_s`.

        Raises `RequestInvalid` for an environment that no rollout will ever be of.
        """
        if environment is not None and self.environments and environment not in self.environments:
            raise RequestInvalid(
                f"no environment of clients outside is called {environment!r}; there are: "
                f"{', '.join(self.environments)}",
                parameter="environment",
                status=404,
            )
        self.asking += 1
        try:
            async with asyncio.timeout(wait_s):
                await wait_until(self._changed, lambda: self._oldest(environment) is not None)
        except TimeoutError:
            pass
        finally:
            self.asking -= 1
        while (queue := self._oldest(environment)) is not None:
            waiting = queue.popleft()
            if not waiting.claimed.done():  # it was cancelled this very moment
                waiting.claimed.set_result(None)
                waiting.session.hear()
                self.claims += 1
                return _told(waiting)
        return None

    def _oldest(self, environment: str | None) -> deque[_Waiting] | None:
        """Where the next rollout is taken from: of any environment, the one that waits first."""
        if environment is not None:
            return self._waiting.get(environment) or None
        queues = [queue for queue in self._waiting.values() if queue]
        return min(queues, key=lambda queue: queue[0].number, default=None)


async def _held(session: Session, offer: Offer) -> None:
    """Until its client ends it. Raises `ClientLost`, `RolloutTimeout`."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + offer.limit_s
    while not session.has_ended:
        until_s = min(ends_s, session.heard_s + offer.lease_s)
        try:
            async with asyncio.timeout_at(until_s):
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


def _told(waiting: _Waiting) -> dict[str, Json]:
    session, offer, task = waiting.session, waiting.offer, waiting.offer.task
    return {
        "id": session.key,
        "environment": task.environment,
        "task_id": task.task_id,
        "seed": task.seed,
        "task": msgspec.Raw(waiting.row),
        "key": session.key,
        "openai_base_url": session.openai_url,
        "anthropic_base_url": session.root_url,
        "rollout_url": session.path_url,
        "lease_s": offer.lease_s,
        "limits": dict(offer.limits),
    }
