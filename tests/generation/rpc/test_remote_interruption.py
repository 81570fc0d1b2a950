"""Pausing, resuming and interrupting generators of other processes, and what becomes of a pause whose holder dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import CorruptData, EngineFailed
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


async def test_a_paused_generator_finishes_nothing_loses_nothing_and_goes_on_when_told(model) -> None:
    brake = Brake()
    async with servers(torch_generator(model, brake)) as (server,):
        client, heard = await server.client(), list[int]()
        call = ask(client, on_chunk=lambda chunk: heard.extend(chunk.token_ids.tolist()))
        await sampling(server.generator)
        assert await client.pause() == 1
        sampled = server.generator.statistics().sampled_tokens_total
        assert len(heard) == sampled < TOKENS  # all of it is here, should the generator die now
        later = ask(client, "later", 2)
        await asyncio.sleep(3 * REPORT_S)
        assert server.generator.statistics().sampled_tokens_total == sampled
        assert not call.done()
        assert not later.done()
        brake.let_go()
        await client.resume()
        done = await call
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert (done.metrics["preemptions"], (await later).num_tokens) == (1, 2)
        assert heard == done.token_ids.tolist()[: len(heard)]
        await client.leave()


async def test_which_tokens_were_sampled_over_older_caches_survives_the_way_and_the_seam() -> None:
    async with servers(simulated_generator(Brake(), chunk_tokens=8), simulated_generator()) as (server, other):
        client, chunks = await server.client(), list[Completion]()
        call = ask(client, tokens=400, on_chunk=chunks.append)
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
        call = ask(clients[0])
        await sampling(both[0].generator)
        assert await clients[0].interrupt({"r"}) == 1
        brake.let_go()
        done = await clients[1](request("r", PROMPT, temperature=0, max_tokens=TOKENS, prefix=await call))
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert done.finish_reason is FinishReason.LENGTH
        sampled = [server.generator.statistics().sampled_tokens_total for server in both]
        assert min(sampled) > 0
        assert sum(sampled) == TOKENS
        for client in clients:
            await client.leave()


async def test_what_never_began_can_be_interrupted(model) -> None:
    async with servers(torch_generator(model)) as (server,):
        client = await server.client()
        await client.pause()
        call = ask(client)
        while await client.interrupt() == 0:
            pass
        partial = await call
        assert (partial.num_tokens, partial.finish_reason) == (0, FinishReason.ABORTED)
        await client.leave()


async def test_a_pause_is_no_lack_of_progress() -> None:
    brake = Brake()
    async with servers(simulated_generator(brake)) as (server,):
        client = await server.client(progress_deadline_s=DEADLINE_S)
        call = ask(client, tokens=400)
        await sampling(server.generator)
        await client.pause()
        await asyncio.sleep(3 * DEADLINE_S)
        assert client.failure is None
        brake.let_go()
        await client.resume()
        assert (await call).num_tokens == 400
        await client.leave()


async def test_weights_that_get_stuck_during_a_pause_are_a_lack_of_progress() -> None:
    come = threading.Event()

    @contextmanager
    def never(_: ModelStateDictRef) -> Iterator[ModelStateDict]:
        come.wait()
        yield ModelStateDict({}, 1)

    async with servers(simulated_generator(), opener=never) as (server,):
        client = await server.client(progress_deadline_s=DEADLINE_S)
        await client.pause()
        with pytest.raises(EngineFailed, match="generator is stuck"):
            await client.load_model_state_dict(ModelStateDictRef(version=1, uri="", num_bytes=0))
        come.set()
        await client.leave()


async def test_a_pause_lasts_until_everyone_who_paused_has_resumed_or_left() -> None:
    async with servers(simulated_generator()) as (server,):
        one, other = await server.client(), await server.client()
        await one.pause()
        await other.pause()
        call = ask(one, tokens=2)
        await one.resume()
        await asyncio.sleep(REPORT_S)
        assert not call.done()
        await other.leave()
        assert (await call).num_tokens == 2
        await one.leave()


HOLDER = """
import asyncio, sys
from tailrace.generation.rpc.client import GeneratorClient
async def main():
    client = GeneratorClient(sys.argv[1])
    await client.hello()
    await client.pause()
    print("paused", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_client_that_is_killed_takes_its_pause_with_it() -> None:
    async with servers(simulated_generator()) as (server,):
        client = await server.client()
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", textwrap.dedent(HOLDER), server.address], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == b"paused\n"
            call = ask(client, tokens=2)
            await asyncio.sleep(2 * REPORT_S)
            assert not call.done()
            process.kill()
            assert (await asyncio.wait_for(call, 20)).num_tokens == 2
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        await client.leave()


async def test_a_caller_that_does_not_wait_for_its_pause_does_not_hold_it() -> None:
    async with servers(simulated_generator()) as (server,):
        client = await server.client()
        pausing = asyncio.create_task(client.pause())
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        await client.resume()
        assert (await ask(client, tokens=2)).num_tokens == 2
        await client.leave()


async def test_only_a_client_that_said_hello_may_pause() -> None:
    async with servers(simulated_generator()) as (server,):
        stranger = GeneratorClient(server.address)
        with pytest.raises(CorruptData, match="must say hello before"):
            await stranger.pause()
        await stranger.leave()


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


async def test_the_router_pauses_and_resumes_every_replica(model) -> None:
    brake = Brake()
    async with fleet(torch_generator(model, brake), torch_generator(model, brake)) as here:
        calls = [ask(here.router, str(index)) for index in range(2)]
        await until(lambda: min(here.sampled()) > 0)
        assert await here.router.pause() == 2
        sampled = here.sampled()
        later = ask(here.router, "later", 3)
        await asyncio.sleep(3 * REPORT_S)
        assert here.sampled() == sampled
        brake.let_go()
        await here.router.resume()
        expected = greedy_reference(model, PROMPT, TOKENS)
        assert [done.token_ids.tolist() for done in await asyncio.gather(*calls)] == [expected] * 2
        assert (await later).token_ids.tolist() == expected[:3]
        assert sum(here.sampled()) == 2 * TOKENS + 3


async def test_a_replica_that_dies_while_paused_loses_no_token_and_one_that_joins_waits(model) -> None:
    async with fleet(torch_generator(model, Brake()), torch_generator(model), joined=1) as here:
        call = ask(here.router)
        await until(lambda: here.sampled()[0] > 0)
        await here.router.pause()
        before = here.sampled()[0]
        await here.servers[0].crash()
        await asyncio.wait_for(here.uses[0], 20)
        await here.join(1)
        await asyncio.sleep(3 * REPORT_S)
        assert not call.done()
        assert here.sampled()[1] == 0
        await here.router.resume()
        assert (await call).token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert here.sampled()[1] == TOKENS - before  # nothing is sampled twice: all of it had been streamed


async def test_a_replica_that_dies_after_a_pause_leaves_no_hole(model) -> None:
    async with fleet(torch_generator(model, Brake()), torch_generator(model), joined=1) as here:
        call = ask(here.router)
        await until(lambda: here.sampled()[0] > 0)
        await here.router.pause()
        before = here.sampled()[0]
        await here.router.resume()
        await until(lambda: here.sampled()[0] > before + 70)
        await here.servers[0].crash()
        await asyncio.wait_for(here.uses[0], 20)
        await here.join(1)
        assert (await call).token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert 0 < here.sampled()[1] < TOKENS - before


async def test_the_router_hands_back_what_is_interrupted_and_it_goes_on_elsewhere(model) -> None:
    brake = Brake()
    async with fleet(torch_generator(model, brake), torch_generator(model, brake)) as here:
        calls = [ask(here.router, name) for name in ("wanted", "other")]
        await until(lambda: min(here.sampled()) > 0)
        await here.router.pause()
        waiting = ask(here.router, "waiting")
        await asyncio.sleep(0)
        assert await here.router.interrupt({"wanted", "waiting"}) == 2
        partial, empty = await calls[0], await waiting
        assert partial.finish_reason is empty.finish_reason is FinishReason.ABORTED
        assert 0 < partial.num_tokens < TOKENS
        assert empty.num_tokens == 0
        brake.let_go()
        await here.router.resume()
        expected = greedy_reference(model, PROMPT, TOKENS)
        rest = await here.router.generate(
            request("wanted", PROMPT, session="elsewhere", group="g", prefix=partial, temperature=0, max_tokens=TOKENS)
        )
        assert rest.token_ids.tolist() == (await calls[1]).token_ids.tolist() == expected


async def test_what_one_replica_hands_back_unasked_goes_on_by_itself(model) -> None:
    brake = Brake()
    async with fleet(torch_generator(model, brake), torch_generator(model, brake)) as here:
        call = ask(here.router)
        await until(lambda: max(here.sampled()) > 0)
        running = here.clients[int(np.argmax(here.sampled()))]
        assert await running.interrupt() == 1
        brake.let_go()
        done = await call
        assert done.token_ids.tolist() == greedy_reference(model, PROMPT, TOKENS)
        assert sum(here.sampled()) == TOKENS


async def test_a_router_without_replicas_left_refuses_to_pause() -> None:
    async with fleet(simulated_generator(), joined=1) as here:
        here.router.fail(EngineFailed("all of them left"))
        with pytest.raises(EngineFailed, match="all of them left"):
            await here.router.pause()
