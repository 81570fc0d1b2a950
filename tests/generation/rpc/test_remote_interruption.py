"""Interrupting generators of other processes, and replicas that die under requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import EngineFailed
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.router.router import Router
from tailrace.generation.router.settings import RouterSettings
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.server import GeneratorServer, OpenModelStateDict
from tailrace.records import (
    Completion,
    FinishReason,
    Generate,
    ModelStateDictRef,
    OnChunk,
)
from tailrace.transport.channels import create_socket_folder, ipc_address
from tailrace.transport.weights.stores import ModelStateDict
from tests.generation.engine_support import Brake, assert_told, greedy_reference, make_engine, request

PROMPT = [3, 1, 4, 1]
TOKENS = 250
REPORT_S = 0.02
DEADLINE_S = 0.3


@contextmanager
def nothing(_: ModelStateDictRef) -> Iterator[ModelStateDict]:
    """No weights are published here."""
    yield ModelStateDict({}, 1)


class Server:
    """A generator behind a socket, in this process; `crash` lets it go as a killed process does."""

    def __init__(self, generator: Generator, opener: OpenModelStateDict, folder: Path, name: str) -> None:
        self.generator, self.address = generator, ipc_address(folder, name)
        self._server = GeneratorServer(generator, opener, self.address, report_every_s=REPORT_S)
        self._serving = asyncio.create_task(self._server.serve())

    async def client(self, **options: object) -> GeneratorClient:
        client = GeneratorClient(self.address, **options)  # type: ignore[arg-type]
        await client.hello()
        return client

    async def crash(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self.generator.close()


@asynccontextmanager
async def servers(*generators: Generator, opener: OpenModelStateDict = nothing) -> AsyncIterator[list[Server]]:
    folder = create_socket_folder()
    made = [Server(generator, opener, folder, f"generator-{index}") for index, generator in enumerate(generators)]
    try:
        for generator in generators:
            await generator.ready()
        yield made
    finally:
        for server in made:
            await server.crash()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def torch_generator(model, brake: Brake | None = None) -> Generator:
    return Generator(lambda: make_engine(model, brake))


def simulated_generator(brake: Brake | None = None, chunk_tokens: int = 64) -> Generator:
    engine = SimulatedEngine(chunk_tokens=chunk_tokens)
    return Generator(lambda: engine if brake is None else brake.on(engine))


def ask(
    generate: Generate, name: str = "r", tokens: int = TOKENS, on_chunk: OnChunk | None = None
) -> asyncio.Task[Completion]:
    return asyncio.create_task(generate(request(name, PROMPT, temperature=0, max_tokens=tokens), on_chunk))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def sampling(generator: Generator, tokens: int = 4) -> None:
    await until(lambda: generator.statistics().sampled_tokens_total >= tokens)


async def test_which_tokens_were_sampled_over_older_caches_survives_the_way_and_the_seam() -> None:
    async with servers(simulated_generator(Brake(), chunk_tokens=8), simulated_generator()) as (server, other):
        client, chunks = await server.client(), list[Completion]()
        call = ask(client.generate, tokens=400, on_chunk=chunks.append)
        await sampling(server.generator)
        await client.load_model_state_dict(ModelStateDictRef(version=1, uri="", num_bytes=0))
        while len(chunks) < 3:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
        await client.interrupt()
        partial = await call
        changed, end = partial.policy_versions.tolist().index(1), partial.num_tokens
        assert partial.mixed_spans == ((changed, end),)
        assert_told(chunks, partial)
        spans = [end - start for chunk in chunks for start, end in chunk.mixed_spans]
        assert sum(spans) == sum(chunk.num_tokens for chunk in chunks) - changed
        elsewhere = await other.client()
        done = await elsewhere.generate(request("r", PROMPT, prefix=partial, temperature=0, max_tokens=400))
        assert (done.num_tokens, done.mixed_spans) == (400, ((changed, end),))
        await client.leave()
        await elsewhere.leave()


async def test_what_was_interrupted_on_one_generator_goes_on_at_the_other(model) -> None:
    brake = Brake()
    async with servers(torch_generator(model, brake), torch_generator(model)) as both:
        clients = [await server.client() for server in both]
        call = ask(clients[0].generate)
        await sampling(both[0].generator)
        assert await clients[0].interrupt({"r"}) == 1
        brake.let_go()
        done = await clients[1].generate(request("r", PROMPT, temperature=0, max_tokens=TOKENS, prefix=await call))
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert done.finish_reason is FinishReason.LENGTH
        sampled = [server.generator.statistics().sampled_tokens_total for server in both]
        assert min(sampled) > 0
        assert sum(sampled) == TOKENS
        for client in clients:
            await client.leave()


async def test_what_never_began_can_be_interrupted() -> None:
    brake = Brake()
    async with servers(Generator(lambda: brake.on(SimulatedEngine(slots=1)))) as (server,):
        client = await server.client()
        running, waiting = ask(client.generate, "running"), ask(client.generate, "waiting")
        await sampling(server.generator)
        while await client.interrupt({"waiting"}) == 0:
            pass
        partial = await waiting
        assert (partial.num_tokens, partial.finish_reason) == (0, FinishReason.ABORTED)
        brake.let_go()
        assert (await running).num_tokens == TOKENS
        await client.leave()


async def test_weights_that_get_stuck_are_a_lack_of_progress() -> None:
    come = threading.Event()

    @contextmanager
    def never(_: ModelStateDictRef) -> Iterator[ModelStateDict]:
        come.wait()
        yield ModelStateDict({}, 1)

    async with servers(simulated_generator(), opener=never) as (server,):
        client = await server.client(progress_deadline_s=DEADLINE_S)
        with pytest.raises(EngineFailed, match="generator is stuck"):
            await client.load_model_state_dict(ModelStateDictRef(version=1, uri="", num_bytes=0))
        come.set()
        await client.leave()


class Fleet:
    """A router over servers, as a run uses it."""

    def __init__(self, *made: Server) -> None:
        self.servers = made
        self.names = [f"generator-{index}" for index in range(len(made))]
        self.router = Router(self.names, RouterSettings(policy="least_loaded"), max_staleness=4)
        self.clients: list[GeneratorClient] = []
        self.uses: list[asyncio.Task[Exception]] = []

    async def join(self, *indices: int) -> None:
        for index in indices:
            client = GeneratorClient(self.servers[index].address)
            welcome = await client.hello()
            self.clients.append(client)
            use = self.router.use(self.names[index], client, welcome.statistics)
            self.uses.append(asyncio.create_task(use))
        await asyncio.sleep(0)

    def sampled(self) -> list[int]:
        return [server.generator.statistics().sampled_tokens_total for server in self.servers]


@asynccontextmanager
async def fleet(*generators: Generator, joined: int = 2) -> AsyncIterator[Fleet]:
    async with servers(*generators) as made:
        here = Fleet(*made)
        try:
            await here.join(*range(joined))
            yield here
        finally:
            here.router.fail(EngineFailed("the test is over"))
            await asyncio.gather(*here.uses, return_exceptions=True)
            for client in here.clients:
                await client.leave()


async def test_a_replica_that_dies_leaves_no_hole_and_every_token_is_told_once(model) -> None:
    async with fleet(torch_generator(model, Brake(after_tokens=100)), torch_generator(model), joined=1) as here:
        told = list[Completion]()
        call = ask(here.router.generate, on_chunk=told.append)
        await until(lambda: here.sampled()[0] > 100)
        await here.servers[0].crash()
        await asyncio.wait_for(here.uses[0], 20)
        before = sum(chunk.num_tokens for chunk in told)
        await here.join(1)
        done = await call
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert_told(told, done)
        assert here.sampled()[1] == TOKENS - before < TOKENS  # what had been streamed is not sampled again


async def test_the_router_hands_back_what_is_interrupted_and_it_goes_on_elsewhere(model) -> None:
    brake = Brake()
    async with fleet(torch_generator(model, brake), torch_generator(model, brake)) as here:
        told = list[Completion]()
        calls = [ask(here.router.generate, "wanted", on_chunk=told.append), ask(here.router.generate, "other")]
        await until(lambda: min(here.sampled()) > 0)
        assert await here.router.interrupt({"wanted"}) == 1
        partial = await calls[0]
        assert partial.finish_reason is FinishReason.ABORTED
        assert 0 < partial.num_tokens < TOKENS
        assert_told(told, partial)
        brake.let_go()
        rest = await here.router.generate(
            request("wanted", PROMPT, session="elsewhere", group="g", prefix=partial, temperature=0, max_tokens=TOKENS),
            on_chunk=told.append,
        )
        assert_told(told, rest)
        expected = greedy_reference(model, PROMPT, TOKENS)
        assert rest.token_ids.tolist() == (await calls[1]).token_ids.tolist() == expected


async def test_a_request_that_waits_for_a_replica_can_be_interrupted() -> None:
    async with fleet(simulated_generator(), joined=0) as here:
        waiting = ask(here.router.generate, "waiting")
        await asyncio.sleep(0)
        assert await here.router.interrupt({"waiting"}) == 1
        partial = await waiting
        assert (partial.num_tokens, partial.finish_reason) == (0, FinishReason.ABORTED)


async def test_what_one_replica_hands_back_unasked_goes_on_by_itself(model) -> None:
    brake = Brake()
    async with fleet(torch_generator(model, brake), torch_generator(model, brake)) as here:
        told = list[Completion]()
        call = ask(here.router.generate, on_chunk=told.append)
        await until(lambda: max(here.sampled()) > 0)
        running = here.clients[int(np.argmax(here.sampled()))]
        assert await running.interrupt() == 1
        brake.let_go()
        done = await call
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert_told(told, done)
        assert sum(here.sampled()) == TOKENS


async def test_a_router_without_replicas_left_refuses_to_interrupt() -> None:
    async with fleet(simulated_generator(), joined=1) as here:
        here.router.fail(EngineFailed("all of them left"))
        with pytest.raises(EngineFailed, match="all of them left"):
            await here.router.interrupt()
