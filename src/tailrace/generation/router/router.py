"""Several generators as one.

    generate() ── policy ──→ replica ── chunks ──→ the request's own record
                   ↑            │ dies, gets stuck
                   └────────────┘ again, from prompt and everything that was streamed back

    weights: every replica, a share of them at once, each straight to the newest (`weights`)

A call waits only for a replica that serves; the owner of the replicas calls `fail` when there will be none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tailrace.errors import EngineFailed
from tailrace.generation.completions import finished
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.generation.router.policies import UNAVAILABLE, LeastLoaded, RoutingPolicy, Sticky
from tailrace.generation.router.replica import Replica, ReplicaClient
from tailrace.generation.router.request import RoutedRequest
from tailrace.generation.router.settings import RouterSettings
from tailrace.generation.router.weights import WeightDistributor
from tailrace.records import Completion, FinishReason, GenerationRequest, ModelStateDictRef, OnChunk
from tailrace.transport.channels import wait_until


class Router:
    """Serves `generate` from replicas that come and go. Its `generate` is a `records.Generate`.

    Make it on a running event loop, with a name for each replica there may be.
    """

    def __init__(
        self,
        names: Sequence[str],
        settings: RouterSettings,
        weights: WeightPolicy = DEFAULT_WEIGHT_POLICY,
        *,
        max_staleness: int,
        awaits_weights: bool = False,
    ) -> None:
        """`awaits_weights`: replicas take no request before weights were published and installed."""
        self._settings = settings
        self._awaits_weights = awaits_weights
        self._starved_at = max(1, max_staleness)
        self.replicas = [Replica(name) for name in names]
        self._policy: RoutingPolicy = (
            Sticky(ratio=settings.escape_ratio, slack=settings.escape_slack)
            if settings.policy == "sticky"
            else LeastLoaded()
        )
        self._loads = [UNAVAILABLE] * len(names)
        self.weights = WeightDistributor(
            weights, loads_at_once=max(1, int(settings.loading_share * len(names))), on_change=self._weights_changed
        )
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._requests: dict[RoutedRequest, None] = {}  # in order of arrival, which a set has not

    # --- requests ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Sample one completion, wherever; see `records.Generate`.

        Raises `EngineFailed` once no replica is left, and `RequestRefused` for a request under which too many died.
        """
        routed = RoutedRequest(request)
        self._requests[routed] = None
        try:
            while (completion := finished(routed.request)) is None:
                index = await self._choose(routed)
                if index is None:
                    return routed.as_aborted()
                if (completion := await self._run_part(index, routed, on_chunk)) is not None:
                    return completion
            return completion
        finally:
            self._requests.pop(routed, None)

    async def _choose(self, routed: RoutedRequest) -> int | None:
        """Wait for a replica that takes the request; None once it is interrupted."""
        while not routed.is_interrupted:
            if self._failure is not None:
                raise EngineFailed(str(self._failure)) from self._failure
            index = self._policy.choose(routed.request.session_id, routed.request.group_id, self._loads)
            if index is not None:
                return index
            self._changed.clear()
            await self._changed.wait()
        return None

    async def _run_part(self, index: int, routed: RoutedRequest, on_chunk: OnChunk | None) -> Completion | None:
        """The completion; None when the request has to go on elsewhere."""
        replica = self.replicas[index]
        client, part, chunks = replica.client, routed.part, list[Completion]()
        assert client is not None

        def keep(chunk: Completion) -> None:
            chunks.append(chunk)
            if on_chunk is not None:
                on_chunk(chunk)

        routed.client = client
        replica.requests += 1
        replica.promise(len(part.prompt_token_ids) + part.sampling.max_tokens)
        self._loads[index] = replica.load
        try:
            completion = await client.generate(part, keep)
        except EngineFailed as error:
            replica.failovers += 1
            client.fail(error)  # its engine is gone, whatever of it still answers
            self._update()
            routed.fail_over(chunks, error, self._settings.max_failovers)
            return None
        finally:
            routed.client = None
            replica.requests -= 1
        if completion.finish_reason is not FinishReason.ABORTED:
            return completion
        routed.continue_from(completion)
        return None

    # --- interruption --------------------------------------------------------------------------------------------

    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        """Hand requests, all or these, back to their callers as they are; how many there were.

        Their completions say `ABORTED`. Raises `EngineFailed` when no replica is left.
        """
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
        ids = None if request_ids is None else frozenset(request_ids)
        wanted = [routed for routed in self._requests if ids is None or routed.request.request_id in ids]
        for routed in wanted:
            routed.is_interrupted = True
        self._update()
        parts: dict[ReplicaClient, set[str]] = defaultdict(set)
        for routed in wanted:
            if routed.client is not None:
                parts[routed.client].add(routed.part.request_id)
        answers = await asyncio.gather(*(one.interrupt(ids) for one, ids in parts.items()), return_exceptions=True)
        for answer in answers:  # one that failed meanwhile has nothing left that could be interrupted
            if isinstance(answer, BaseException) and not isinstance(answer, EngineFailed):
                raise answer
        return len(wanted)

    # --- replicas ------------------------------------------------------------------------------------------------

    async def use(self, name: str, client: ReplicaClient, statistics: EngineStatistics) -> Exception:
        """Send requests and weights to a generator that is connected, until it fails; what ended it.

        It takes requests once it holds the newest version. Raises `TailraceError` when that cannot be installed.
        """
        index = self._index(name)
        replica = self.replicas[index]
        replica.join(client, statistics)
        self._policy.forget(index)
        replica.starved = self._awaits_weights or self.weights.newest is not None
        ended = asyncio.ensure_future(client.failed())
        following = asyncio.create_task(
            self.weights.follow(replica, client.load_model_state_dict), name=f"weights of {name}"
        )
        starving = asyncio.create_task(self._starve(replica, client), name=f"watch over the version of {name}")
        self._update()
        try:
            await asyncio.wait({ended, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done() and not ended.done():
                try:
                    following.result()
                except EngineFailed as error:
                    client.fail(error)
            return await ended
        finally:
            replica.client = None
            self._update()
            for task in (ended, following, starving):
                task.cancel()
            await asyncio.gather(ended, following, starving, return_exceptions=True)

    def report(self, name: str, statistics: EngineStatistics, received: int) -> None:
        """Take a replica's report: a `ReportListener`."""
        index = self._index(name)
        self.replicas[index].report(statistics, received)
        self._loads[index] = self.replicas[index].load

    def restarted(self, name: str) -> None:
        """Count a restart."""
        self.replicas[self._index(name)].restarts += 1

    def fail(self, failure: Exception) -> None:
        """No replica is left and none will come: every waiting and every later call fails with `EngineFailed`."""
        self._failure = self._failure or failure
        for replica in self.replicas:
            if replica.client is not None:
                replica.client.fail(self._failure)
        self._update()

    async def serving(self) -> None:
        """Wait until some replica takes requests. Raises `EngineFailed` when none will."""
        await self._until(lambda: min(self._loads) != UNAVAILABLE)

    # --- weights -------------------------------------------------------------------------------------------------

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        """Publish weights, and wait until every replica holds them or newer ones; the lowest version that is held.

        Raises `EngineFailed` when no replica is left.
        """
        self.weights.publish(ref)
        await self._until(lambda: self.weights.lowest_version >= ref.version)
        return self.weights.lowest_version

    def _weights_changed(self) -> None:
        """Whether replicas hold weights that are new enough for new requests."""
        if (newest := self.weights.newest) is not None:
            for replica in self.replicas:
                # One that came back must first reach the newest version; later it may trail as far as tokens may be
                # stale.
                replica.starved = newest.version - replica.version >= (1 if replica.starved else self._starved_at)
        self._update()

    async def _starve(self, replica: Replica, client: ReplicaClient) -> None:
        """Waits for a replica to be starved of weights for longer than it may be; fails it then."""
        deadline_s = self._settings.starved_deadline_s
        while True:
            await self._until(lambda: replica.starved and self.weights.newest is not None)
            try:
                async with asyncio.timeout(deadline_s):
                    await self._until(lambda: not replica.starved)
            except TimeoutError:
                client.fail(
                    EngineFailed(
                        f"{replica.name} is starved of weights: for {deadline_s:g} s its version {replica.version} "
                        "trailed the trainer's (generator.router.starved_deadline_s)"
                    )
                )
                return

    # --- waiting -------------------------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, or raise what ended the router."""
        await wait_until(self._changed, lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    def _update(self) -> None:
        """Which replicas take requests may have changed: wake waiters."""
        self._loads[:] = [replica.load for replica in self.replicas]
        self._changed.set()

    def _index(self, name: str) -> int:
        return next(index for index, replica in enumerate(self.replicas) if replica.name == name)
