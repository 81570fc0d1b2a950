"""New weights to every generator of a run: the one owner of newest-wins and of retries.

    publish(ref) ──→ newest ──→ one follower per replica: loads it, retries where that fails
                        ↑       a share of the replicas loads at once, and as many that are starved
    listener ←── installed: the lowest version that the replicas hold; or not installed

The old weights serve until new ones are installed. Versions published while one loads are skipped but for the newest,
and take no load back: under `drain` requests would be let in between, and no drain would come to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeAlias

from tailrace.errors import EngineFailed, ModelError, TailraceError
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.router.replica import Replica
from tailrace.generation.router.turns import Turns
from tailrace.records import ModelStateDictRef
from tailrace.timeouts import timeout_at
from tailrace.tracing.phases import phase

_logger = logging.getLogger(__name__)

LoadModelStateDict: TypeAlias = Callable[[ModelStateDictRef], Awaitable[int]]
"""Installs weights in one generator; the version really installed. See `Generator.load_model_state_dict`."""

_LONGEST_PAUSE_S = 30.0
_LOADS_IN_VAIN = 5
"""Loads in a row after which a replica that takes no requests still is told of."""
_WOKEN_AT_ONCE = 64
"""Followers that new weights wake in one turn of the loop: a thousand at once held it for 50 ms."""


class WeightListener(Protocol):
    """Learns which weights serve."""

    def weights_installed(self, version: int, duration_s: float) -> None:
        """Every generator holds `version` or a newer one, `duration_s` after it was published."""

    def weights_not_installed(self, version: int) -> None:
        """A generator failed to install `version` as often as is waited for; it goes on with the old weights."""


class WeightDistributor:
    """Brings the newest published weights to replicas that come and go. Make it on a running event loop."""

    def __init__(
        self,
        policy: WeightPolicy = DEFAULT_WEIGHT_POLICY,
        *,
        loads_at_once: Callable[[int], int] = lambda replicas: 1,
        starved_deadline_s: float = math.inf,
        on_change: Callable[[Replica | None], None] = lambda replica: None,
    ) -> None:
        """`loads_at_once` says how many of so many replicas may load at the same time, one at least. That many may
        which take requests, and that many which are starved: however long these load, those wait for none of them.

        A replica that is starved, or was given none of the trainer's weights yet, is given up once loads that failed,
        and the pauses after them, came to `starved_deadline_s` since one succeeded. What a load takes that succeeds,
        and the wait for its turn, are no part of that.

        `on_change` is called when a replica installed a version, or is gone, and with None when one was published.
        """
        self.newest: ModelStateDictRef | None = None
        self.installed_version = -1
        """The newest one of which was told that every replica holds it, or a newer one."""
        self.listener: WeightListener | None = None
        self._policy, self._on_change = policy, on_change
        self._starved_deadline_s = starved_deadline_s
        self._replicas = dict[Replica, None]()
        self._loads_at_once = loads_at_once
        self._turns, self._turns_of_starved = Turns(self._at_once), Turns(self._at_once)
        self._counted = dict[Replica, int]()
        """Those that are admitted, and the version that each counts for."""
        self._holders = Counter[int]()
        """How many of them hold each version. Few are held at a time, by however many."""
        self._trainer_lives = 0
        self._life_of_newest = 0
        self._published_s: dict[int, float] = {}
        """When versions were published that not every replica holds."""
        self._followers = dict[asyncio.Future[None], None]()
        """That wait for newer weights than they have."""
        self._clock = asyncio.get_running_loop().time

    def _at_once(self) -> int:
        return self._loads_at_once(len(self._replicas))

    @property
    def lowest_version(self) -> int:
        """That a replica which serves holds; -1 where one holds no published version, or none is there.

        One that joined and is not admitted yet holds nobody up.
        """
        return min(self._holders, default=-1)

    def is_installed(self, version: int) -> bool:
        """Whether `lowest_version` is that, or newer."""
        return self.lowest_version >= version

    def _count(self, replica: Replica) -> None:
        """It may hold another version, be admitted, or be gone."""
        if (before := self._counted.pop(replica, None)) is not None:
            self._holders[before] -= 1
            if not self._holders[before]:
                del self._holders[before]
        if replica in self._replicas and replica.is_admitted:
            self._counted[replica] = replica.version
            self._holders[replica.version] += 1

    def publish(self, ref: ModelStateDictRef) -> None:
        """These are the weights to serve from now on, unless newer ones were published before."""
        if self.newest is None or ref.version >= self.newest.version:
            self.newest, self._life_of_newest = ref, self._trainer_lives
            self._published_s[ref.version] = self._clock()
            self._wake(deque(self._followers))
            self._update(None)

    def trainer_restarted(self) -> None:
        """What is published from now on replaces weights of the same version, too, and never those of a newer one."""
        self._trainer_lives += 1

    async def follow(self, replica: Replica, load: LoadModelStateDict) -> NoReturn:
        """Keep a replica at the newest version; cancel it when the replica is gone.

        Raises `EngineFailed` once the replica is of no use or went without weights for too long, and `ModelError` when
        the first weights that it is given are not its model's, `attempts` times: none of the trainer's will be.
        """
        self._replicas[replica] = None
        self._count(replica)
        for turns in (self._turns, self._turns_of_starved):
            turns.give()  # more may load at once, of more
        tried, attempt, life, starved_s, in_vain = -1, 0, self._life_of_newest, 0.0, 0
        try:
            while True:
                await self._newer_than(replica.version, life)
                async with (self._turns_of_starved if replica.starved else self._turns).turn():
                    ref, life_of_ref = await self._newer_than(replica.version, life), self._life_of_newest
                    tried, attempt = ref.version, attempt + 1 if ref.version == tried else 1
                    lacks_weights, began_s = replica.starved or replica.version < 0, self._clock()
                    error = await self._load(replica, load, ref)
                if error is None:
                    life, starved_s = life_of_ref, 0.0
                    self._update(replica)
                    in_vain = in_vain + 1 if replica.starved else 0
                    if in_vain == _LOADS_IN_VAIN:
                        self._warn_of_slow(replica)
                    continue
                self._report(replica, ref.version, attempt, error)
                deadline_s = began_s + self._starved_deadline_s - starved_s if lacks_weights else math.inf
                if self._clock() >= deadline_s:
                    raise self._starved(replica, ref.version, error)
                await self._pause(ref.version, life_of_ref, attempt, deadline_s)
                starved_s += self._clock() - began_s if lacks_weights else 0.0
        finally:
            self._replicas.pop(replica, None)
            self._update(replica)

    async def _load(self, replica: Replica, load: LoadModelStateDict, ref: ModelStateDictRef) -> TailraceError | None:
        """One attempt; the error where it failed. Raises `EngineFailed`."""
        about = {"version": ref.version, "replica": replica.name}
        try:
            with phase("load_model_state_dict", track="weights", about=about):
                version = await load(ref)
        except EngineFailed:
            raise
        except TailraceError as error:
            return error
        replica.version = max(replica.version, version)
        return None

    def _report(self, replica: Replica, version: int, attempt: int, error: TailraceError) -> None:
        """Log an attempt that failed; after `attempts` of them the version counts as not installed."""
        attempts = self._policy.attempts
        if attempt <= attempts:
            _logger.warning(
                "%s goes on with version %d; version %d was not installed (attempt %d of %d): %s",
                *(replica.name, max(0, replica.version), version, attempt, attempts, error),
            )
        if attempt == attempts:
            if self.listener is not None:
                self.listener.weights_not_installed(version)
            if replica.version < 0 and isinstance(error, ModelError):
                raise error

    def _warn_of_slow(self, replica: Replica) -> None:
        _logger.warning(
            "%s has loaded weights %d times and takes no requests: it trails the trainer by more than half of "
            "scheduling.max_staleness whenever a load ends. Its loads are too slow for the trainer's steps",
            *(replica.name, _LOADS_IN_VAIN),
        )

    def _starved(self, replica: Replica, version: int, error: TailraceError) -> EngineFailed:
        return EngineFailed(
            f"{replica.name} is starved of weights: its version {max(0, replica.version)} trails the trainer's, and "
            f"loads failed for {self._starved_deadline_s:g} s (generator.router.starved_deadline_s), the last one of "
            f"version {version}: {error}"
        )

    async def _pause(self, version: int, life: int, attempt: int, deadline_s: float) -> None:
        """Before the next attempt, each twice as long as the last one, until `deadline_s` at most.

        A newer version is tried at once, so that no replica becomes starved meanwhile.
        """
        pause_s = min(self._policy.backoff_s * 2 ** min(attempt - 1, 30), _LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            async with timeout_at(min(self._clock() + pause_s, deadline_s)):
                await self._newer_than(version, life)

    async def _newer_than(self, version: int, life: int) -> ModelStateDictRef:
        """Wait for newer weights than these, which one life of the trainer published; the newest there are."""
        while not self._is_newer(version, life):
            published = asyncio.get_running_loop().create_future()
            self._followers[published] = None
            try:
                await published
            finally:
                del self._followers[published]
        assert self.newest is not None
        return self.newest

    def _wake(self, followers: deque[asyncio.Future[None]]) -> None:
        """Some in this turn of the loop, the others in those that follow."""
        for _ in range(min(_WOKEN_AT_ONCE, len(followers))):
            published = followers.popleft()
            if not published.done():
                published.set_result(None)
        if followers:
            asyncio.get_running_loop().call_soon(self._wake, followers)

    def _is_newer(self, version: int, life: int) -> bool:
        """The same version counts where a later life of the trainer published it."""
        if self.newest is None:
            return False
        return self.newest.version > version or (self.newest.version == version and self._life_of_newest > life)

    def _update(self, replica: Replica | None) -> None:
        """A version was published, or this replica installed one, or is gone: report what now serves."""
        self._on_change(replica)  # which may admit it
        for changed in self._replicas if replica is None else (replica,):
            self._count(changed)
        lowest = self.lowest_version
        serving = [version for version in self._published_s if version <= lowest]
        if serving:
            duration_s = self._clock() - self._published_s[max(serving)]
            for version in serving:
                del self._published_s[version]
            self.installed_version = max(self.installed_version, lowest)
            if self.listener is not None:
                self.listener.weights_installed(lowest, duration_s)
