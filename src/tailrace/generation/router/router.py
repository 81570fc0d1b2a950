"""Several generators as one.

    generate() ── policy ──→ replica ── chunks ──→ the request's own record
                   ↑            │ dies, gets stuck
                   └────────────┘ again, from prompt and everything that was streamed back

    weights: every replica, a share of them at once, each straight to the newest (`weights`)

A call waits only for a replica that serves; whoever owns the replicas says when there will be none (`fail`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tailrace.errors import EngineFailed
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.engine_thread.inbox import CutListener
from tailrace.generation.engines.protocol import EngineStatistics, SampledTokens
from tailrace.generation.router.policies import UNAVAILABLE, LeastLoaded, RoutingPolicy, Sticky
from tailrace.generation.router.replica import Replica, ReplicaClient, ReplicaFigures
from tailrace.generation.router.request import RoutedRequest
from tailrace.generation.router.settings import RouterSettings
from tailrace.generation.router.weights import WeightDistributor
from tailrace.records import Completion, FinishReason, Int32Array, ModelStateDictRef, SamplingParams
from tailrace.transport.channels import wait_until

ToldT = TypeVar("ToldT")


class Router:
    """Serves `generate` from replicas that come and go. Implements `records.Generate` by calling it.

    Make it on a running event loop, with a name for each replica there may be.
    """

    def __init__(
        self,
        names: Sequence[str],
        settings: RouterSettings,
        weights: WeightPolicy = DEFAULT_WEIGHT_POLICY,
        *,
        max_staleness: int,
    ) -> None:
        self._settings = settings
        self._starved_at = max(1, max_staleness)
        self._replicas = [Replica(name) for name in names]
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
        self._requests: set[RoutedRequest] = set()
        self._is_paused = False
        self._on_cut: CutListener | None = None

    # --- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_token_ids: Int32Array,
        *,
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        group_id: str,
        prefix: Completion | None = None,
    ) -> Completion:
        """Sample one completion, wherever; see `Generator.generate`.

        Raises `EngineFailed` once no replica is left, and `RequestRefused` for a request under which too many died.
        """
        request = RoutedRequest(prompt_token_ids, sampling, request_id, session_id, group_id, prefix)
        self._requests.add(request)
        try:
            while (reason := request.finish_reason) is None:
                index = await self._choose(request)
                if index is None:
                    return request.interrupted()
                completion = await self._ask(self._replicas[index], index, request)
                if completion is not None:
                    return completion
        except asyncio.CancelledError:
            if self._on_cut is not None and request.prefix is not None:
                self._on_cut(request_id, request.prefix.num_tokens)
            raise
        finally:
            self._requests.discard(request)
        assert request.prefix is not None
        return replace(request.prefix, finish_reason=reason)

    __call__ = generate

    def tell_of_cuts(self, on_cut: CutListener) -> None:
        """From now on `on_cut` is told of requests that are cancelled; their tokens are those streamed back by then."""
        self._on_cut = on_cut

    async def _choose(self, request: RoutedRequest) -> int | None:
        """Wait for a replica that takes the request; None once it is interrupted."""
        while not request.is_interrupted:
            if self._failure is not None:
                raise EngineFailed(str(self._failure)) from self._failure
            if not self._is_paused:
                index = self._policy.choose(request.session_id, request.group_id, self._loads)
                if index is not None:
                    return index
            await self._next_change()
        return None

    async def _ask(self, replica: Replica, index: int, request: RoutedRequest) -> Completion | None:
        """The completion; None when the request has to go on elsewhere."""
        client, chunks = replica.client, list[SampledTokens]()
        assert client is not None
        request.client = client
        replica.requests += 1
        replica.sent(len(request.prompt_token_ids) + request.sampling.max_tokens)
        self._loads[index] = replica.load
        try:
            completion = await client.generate(
                request.prompt_token_ids,
                sampling=request.sampling,
                request_id=request.part_id,
                session_id=request.session_id,
                group_id=request.group_id,
                prefix=request.prefix,
                on_chunk=chunks.append,
            )
        except asyncio.CancelledError:
            request.prefix = request.with_chunks(chunks)
            raise
        except EngineFailed as error:
            replica.failovers += 1
            client.fail(error)  # its engine is gone, whatever of it still answers
            self._update()
            request.lost(chunks, error, self._settings.max_failovers)
            return None
        finally:
            request.client = None
            replica.requests -= 1
        replica.completions += 1
        if completion.finish_reason is not FinishReason.ABORTED:
            return completion
        request.goes_on(completion)
        return None

    # --- interruption --------------------------------------------------------------------------------------------

    async def pause(self) -> int:
        """Take every running request off its replica, with its tokens, and start none; how many there were.

        Whoever awaits them waits on, also when a replica dies or joins meanwhile. Weights may be loaded. `resume` ends
        it, also where this was cancelled. Raises `EngineFailed` when no replica is left.
        """
        self._is_paused = True
        return sum(await self._tell(lambda client: client.pause()))

    async def resume(self) -> None:
        """Go on with what was paused, each request as its prompt and what it had sampled, the rest of its budget."""
        self._is_paused = False
        self._update()
        await self._tell(lambda client: client.resume())

    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        """Hand requests, all or these, back to their callers as they are; how many there were.

        Their completions say `ABORTED`: whoever gets one goes on with it as `prefix`, here or elsewhere.
        """
        ids = None if request_ids is None else frozenset(request_ids)
        wanted = [request for request in self._requests if ids is None or request.request_id in ids]
        for request in wanted:
            request.is_interrupted = True
        self._update()
        parts: dict[ReplicaClient, set[str]] = defaultdict(set)
        for request in wanted:
            if request.client is not None:
                parts[request.client].add(request.part_id)
        await self._tell(lambda client: client.interrupt(parts[client]), parts)
        return len(wanted)

    async def _tell(
        self, what: Callable[[ReplicaClient], Awaitable[ToldT]], clients: Iterable[ReplicaClient] | None = None
    ) -> list[ToldT]:
        """What these replicas, or all, answer. One that fails meanwhile has nothing left that could be told."""
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure
        if clients is None:
            clients = [replica.client for replica in self._replicas if replica.client is not None]
        answers = await asyncio.gather(*(what(client) for client in clients), return_exceptions=True)
        told = list[ToldT]()
        for answer in answers:
            if not isinstance(answer, BaseException):
                told.append(answer)
            elif not isinstance(answer, EngineFailed):
                raise answer
        return told

    # --- replicas ------------------------------------------------------------------------------------------------

    async def use(self, name: str, client: ReplicaClient, statistics: EngineStatistics) -> Exception:
        """Send requests and weights to a generator that is connected, until it fails; what ended it.

        It takes requests once it holds the newest version. Raises `TailraceError` when that cannot be installed.
        """
        index = self._index(name)
        replica = self._replicas[index]
        replica.joined(client, statistics)
        self._policy.forget(index)
        replica.starved = self.weights.newest is not None
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

    def heard(self, name: str, statistics: EngineStatistics, received: int) -> None:
        """A replica's report. See `GeneratorClient`."""
        index = self._index(name)
        self._replicas[index].reported(statistics, received)
        self._loads[index] = self._replicas[index].load

    def restarted(self, name: str) -> None:
        """Count a restart."""
        self._replicas[self._index(name)].restarts += 1

    def completions(self, name: str) -> int:
        """Of a replica since it last joined."""
        return self._replicas[self._index(name)].completions

    def fail(self, failure: Exception) -> None:
        """No replica is left and none will come: every waiting and every later call fails with `EngineFailed`."""
        self._failure = self._failure or failure
        for replica in self._replicas:
            if replica.client is not None:
                replica.client.fail(self._failure)
        self._update()

    def figures(self) -> list[ReplicaFigures]:
        """A snapshot of every replica."""
        return [replica.figures() for replica in self._replicas]

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
            for replica in self._replicas:
                # One that came back must first reach the newest version; later it may trail as far as tokens may be
                # stale.
                replica.starved = newest.version - replica.version >= (1 if replica.starved else self._starved_at)
        self._update()

    async def _starve(self, replica: Replica, client: ReplicaClient) -> None:
        """Waits for a replica to be starved of weights for longer than it may be; fails it then."""
        deadline_s = self._settings.starved_deadline_s
        while True:
            await self._until(lambda: replica.starved)
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

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, or raise what ended the router."""
        await wait_until(self._changed, lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    def _update(self) -> None:
        """Something may take requests that did not, or the other way round."""
        self._loads[:] = [replica.load for replica in self._replicas]
        self._changed.set()

    def _index(self, name: str) -> int:
        return next(index for index, replica in enumerate(self._replicas) if replica.name == name)
