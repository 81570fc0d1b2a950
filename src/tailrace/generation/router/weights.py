"""New weights to every generator of a run: the one owner of newest-wins and of retries.

    publish(ref) ──→ newest ──→ one follower per replica: loads it, retries where that fails
                        ↑       a share of the replicas loads at once
    listener ←── installed: the lowest version that the replicas hold; or not installed

The old weights serve until new ones are installed. Versions published while one loads are skipped but for the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeAlias

from tailrace.errors import EngineFailed, TailraceError
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.router.replica import Replica
from tailrace.records import ModelStateDictRef
from tailrace.tracing.phases import phase
from tailrace.transport.channels import wait_until

_logger = logging.getLogger(__name__)

LoadModelStateDict: TypeAlias = Callable[[ModelStateDictRef], Awaitable[int]]
"""Installs weights in one generator; the version really installed. See `Generator.load_model_state_dict`."""

_LONGEST_PAUSE_S = 30.0


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
        loads_at_once: int = 1,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a version was published or installed."""
        self.newest: ModelStateDictRef | None = None
        self.listener: WeightListener | None = None
        self._policy, self._on_change = policy, on_change
        self._loading = asyncio.Semaphore(loads_at_once)
        self._replicas: set[Replica] = set()
        self._trainer_lives = 0
        self._life_of_newest = 0
        self._published_s: dict[int, float] = {}
        """When versions were published that not every replica holds."""
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    @property
    def lowest_version(self) -> int:
        """That a replica holds; -1 where one holds no published version, or none is there."""
        return min((replica.version for replica in self._replicas), default=-1)

    def publish(self, ref: ModelStateDictRef) -> None:
        """These are the weights to serve from now on, unless newer ones were published before."""
        if self.newest is None or ref.version >= self.newest.version:
            self.newest, self._life_of_newest = ref, self._trainer_lives
            self._published_s[ref.version] = self._clock()
            self._update()

    def trainer_restarted(self) -> None:
        """What is published from now on replaces weights of the same version, too, and never those of a newer one."""
        self._trainer_lives += 1

    async def follow(self, replica: Replica, load: LoadModelStateDict) -> NoReturn:
        """Keep a replica at the newest version; cancel it when the replica is gone.

        Raises `EngineFailed` once the replica is of no use, and the last error when the first weights of a replica that
        holds none were tried `attempts` times: there is nothing that it could go on with.
        """
        self._replicas.add(replica)
        tried, attempt, life = -1, 0, self._life_of_newest
        try:
            while True:
                await self._newer_than(replica.version, life)
                async with self._loading:
                    ref, life_of_ref = await self._newer_than(replica.version, life), self._life_of_newest
                    tried, attempt = ref.version, attempt + 1 if ref.version == tried else 1
                    error = await self._load(replica, load, ref)
                if error is None:
                    life = life_of_ref
                    self._update()
                else:
                    self._report(replica, ref.version, attempt, error)
                    await self._pause(ref.version, life_of_ref, attempt)
        finally:
            self._replicas.discard(replica)
            self._update()

    async def _load(self, replica: Replica, load: LoadModelStateDict, ref: ModelStateDictRef) -> TailraceError | None:
        """One attempt; the error where it failed. Raises `EngineFailed`."""
        about = {"version": ref.version, "replica": replica.name}
        try:
            with phase("load_model_state_dict", track="weights", about=about):
                drains = self._policy.update == "drain"
                version = await (self._load_unless_newer(load, ref) if drains else load(ref))
        except EngineFailed:
            raise
        except TailraceError as error:
            return error
        replica.version = max(replica.version, version)
        return None

    async def _load_unless_newer(self, load: LoadModelStateDict, ref: ModelStateDictRef) -> int:
        """A load that may wait long for running requests to end: newer weights take its place; -1 then."""
        loading = asyncio.ensure_future(load(ref))
        newer = asyncio.ensure_future(self._newer_than(ref.version, self._life_of_newest))
        try:
            await asyncio.wait({loading, newer}, return_when=asyncio.FIRST_COMPLETED)
            return loading.result() if loading.done() else -1
        finally:
            loading.cancel()
            newer.cancel()
            await asyncio.gather(loading, newer, return_exceptions=True)

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
            if replica.version < 0:
                raise error

    async def _pause(self, version: int, life: int, attempt: int) -> None:
        """Before the next attempt, each twice as long as the last one. A newer version is tried at once."""
        pause_s = min(self._policy.backoff_s * 2 ** min(attempt - 1, 30), _LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._newer_than(version, life)

    async def _newer_than(self, version: int, life: int) -> ModelStateDictRef:
        """Wait for newer weights than these, which one life of the trainer published; the newest there are."""
        await wait_until(self._changed, lambda: self._is_newer(version, life))
        assert self.newest is not None
        return self.newest

    def _is_newer(self, version: int, life: int) -> bool:
        """The same version counts where a later life of the trainer published it."""
        if self.newest is None:
            return False
        return self.newest.version > version or (self.newest.version == version and self._life_of_newest > life)

    def _update(self) -> None:
        """A version was published or installed, or a replica is gone: wake who waits, and report what now serves."""
        self._changed.set()
        self._on_change()
        lowest = self.lowest_version
        serving = [version for version in self._published_s if version <= lowest]
        if serving:
            duration_s = self._clock() - self._published_s[max(serving)]
            for version in serving:
                del self._published_s[version]
            if self.listener is not None:
                self.listener.weights_installed(lowest, duration_s)
