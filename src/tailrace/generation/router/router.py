"""Several generators as one.

    generate() ── policy ──→ replica ── chunks ──→ the request's own record
                   ↑            │ dies, gets stuck
                   └────────────┘ again, from prompt and everything that was streamed back

    weights: every replica, a share of them at once, each straight to the newest (`weights`)
    release: no new requests, and those it has are handed back with their tokens, to go on elsewhere

A call waits only for a replica that serves; the owner of the replicas calls `fail` when there will be none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tailrace.cancelling import cancelled
from tailrace.errors import EngineFailed, ReplicaReleased, TailraceError
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
        self.on_change: Callable[[Replica], None] = lambda replica: None
        """Called when it may have changed whether this replica takes requests."""
        self._settings = settings
        self._awaits_weights = awaits_weights
        self._starved_at = max(1, max_staleness)
        self.replicas = [Replica(name) for name in names]
        self._indexes = {name: index for index, name in enumerate(names)}
        self._noticed = {name: asyncio.Event() for name in names}
        """Set when this replica leaves, or is empty: only what watches over it wakes."""
        self._policy: RoutingPolicy = (
            Sticky(ratio=settings.escape_ratio, slack=settings.escape_slack)
            if settings.policy == "sticky"
            else LeastLoaded()
        )
        self._loads = [UNAVAILABLE] * len(names)
        self.weights = WeightDistributor(
            weights,
            loads_at_once=lambda replicas: max(1, int(settings.loading_share * replicas)),
            starved_deadline_s=settings.starved_deadline_s,
            on_change=self._weights_changed,
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
            self._update(replica)
            routed.fail_over(chunks, error, self._settings.max_failovers)
            return None
        finally:
            routed.client = None
            replica.requests -= 1
            if replica.leaves_for and not replica.requests:
                self._update(replica)
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
        self._changed.set()
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
        """Send requests and weights to a generator that is connected, until it fails or was released; what ended it.

        It takes requests once it holds a version that is new enough. Raises `TailraceError` when none can be installed.
        """
        index = self._indexes[name]
        replica = self.replicas[index]
        replica.join(client, statistics)
        self._policy.forget(index)
        replica.starved = self._awaits_weights or self.weights.newest is not None
        replica.is_admitted = not replica.starved
        ended = asyncio.ensure_future(client.failed())
        following = asyncio.create_task(
            self.weights.follow(replica, client.load_model_state_dict), name=f"weights of {name}"
        )
        leaving = asyncio.create_task(self._emptied(replica, client), name=f"release of {name}")
        self._update(replica)
        try:
            await asyncio.wait({ended, following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not ended.done():
                try:
                    return leaving.result()
                except TailraceError as error:  # it hands back nothing: its requests go on from what it streamed
                    client.fail(error)
            if following.done() and not ended.done():
                try:
                    following.result()
                except EngineFailed as error:
                    client.fail(error)
            return await ended
        finally:
            replica.client = None
            self._update(replica)
            await cancelled(ended, following, leaving)

    def release(self, name: str, reason: str) -> None:
        """Let a replica go: it takes no new requests, and those that it has go on elsewhere, with all their tokens.

        `use` then ends with `ReplicaReleased`. Does nothing where it is not there.
        """
        replica = self.replicas[self._indexes[name]]
        if replica.client is not None and not replica.leaves_for:
            replica.leaves_for = reason
            self._update(replica)

    async def _emptied(self, replica: Replica, client: ReplicaClient) -> ReplicaReleased:
        """Waits for a replica to be released, and then for its requests to be handed back. Raises `EngineFailed`."""
        noticed = self._noticed[replica.name]
        await wait_until(noticed, lambda: bool(replica.leaves_for))
        while replica.requests:  # one more turn for what was on its way as it was asked
            await client.interrupt()
            await wait_until(noticed, lambda: not replica.requests)
        return ReplicaReleased(f"{replica.name} left: {replica.leaves_for}")

    def report(self, name: str, statistics: EngineStatistics, received: int) -> None:
        """Take a replica's report: a `ReportListener`."""
        index = self._indexes[name]
        self.replicas[index].report(statistics, received)
        self._loads[index] = self.replicas[index].load

    def restarted(self, name: str) -> None:
        """Count a restart."""
        self.replicas[self._indexes[name]].restarts += 1

    def fail(self, failure: Exception) -> None:
        """No replica is left and none will come: every waiting and every later call fails with `EngineFailed`."""
        self._failure = self._failure or failure
        for replica in self.replicas:
            if replica.client is not None:
                replica.client.fail(self._failure)
            self._update(replica)

    async def serving(self) -> None:
        """Wait until some replica takes requests. Raises `EngineFailed` when none will."""
        await self._until(lambda: min(self._loads) != UNAVAILABLE)

    # --- weights -------------------------------------------------------------------------------------------------

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        """Publish weights, and wait until every replica holds them or newer ones; the lowest version that is held.

        Raises `EngineFailed` when no replica is left.
        """
        self.weights.publish(ref)
        await self._until(lambda: self.weights.is_installed(ref.version))
        return self.weights.lowest_version

    def _weights_changed(self, changed: Replica | None) -> None:
        """Whether this replica, or with None each, holds weights that are new enough for new requests."""
        newest = self.weights.newest
        for replica in self.replicas if changed is None else [changed]:
            was_starved = replica.starved
            if newest is not None:
                self._judge(replica, trails_by=newest.version - max(0, replica.version))
            if replica is changed or replica.starved or was_starved:
                self._update(replica)
        self._changed.set()

    def _judge(self, replica: Replica, trails_by: int) -> None:
        """It may trail as far as tokens may be stale; one that did must first be near again, within half of that.

        So must one that joins. From then on nothing counts as installed that it does not hold, and it serves once it
        holds what counted before, which its next load brings. A load may take longer than a step: then it ends with
        neither the newest version nor what all others hold meanwhile.

        One that was there before anything was published serves the model that it started with, which is version 0.
        """
        is_near = trails_by <= self._starved_at // 2
        replica.is_admitted = replica.is_admitted or (is_near and replica.version >= 0)
        replica.starved = (
            trails_by >= self._starved_at
            or (replica.starved and not is_near)
            or not replica.is_admitted
            or replica.version < self.weights.installed_version
        )

    # --- waiting -------------------------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, or raise what ended the router."""
        await wait_until(self._changed, lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    def _update(self, replica: Replica) -> None:
        """Whether it takes requests may have changed: wake waiters. The cost does not grow with other replicas."""
        self._loads[self._indexes[replica.name]] = replica.load
        self._noticed[replica.name].set()
        self._changed.set()
        self.on_change(replica)
