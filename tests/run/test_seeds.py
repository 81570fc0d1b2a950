"""One seed for a run: of its tasks' order, its trainer's random numbers and its generators' random streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch

from tailrace.environments import load_environment
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.models.identity import identify
from tailrace.run.generators import Generators, seed_of_life
from tailrace.run.replica_sources import ConnectedGenerator
from tailrace.scheduling import TaskSource, TaskStream
from tailrace.transport.channels import wait_until
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.generation.engine_support import make_engine, make_model, request
from tests.run.runs import rollouts, run_inline, tiny_settings

MODEL = "bundled:quickstart"


def test_every_life_of_every_generator_has_random_streams_of_its_own() -> None:
    lives = list(itertools.product((0, 7), range(3), range(3)))
    assert len({seed_of_life(*one) for one in lives}) == len(lives)
    assert seed_of_life(7, 0, 0) == 7


@pytest.mark.parametrize(
    ("given", "seed"),
    [((), 0), (("--seed", "5"), 5), (("--seed", "5", "--generator.seed", "0"), 0), (("--generator.seed", "6"), 6)],
)
def test_generators_have_the_seed_of_the_run_where_none_is_given_to_them(given: tuple[str, ...], seed: int) -> None:
    assert tiny_settings(*given).generator_seed == seed


async def test_tasks_and_trainer_have_the_seed_of_the_run(tmp_path: Path) -> None:
    settings = tiny_settings("--seed", "5")
    await run_inline(tmp_path, "--seed", "5", "--max_steps", "1")
    assert torch.initial_seed() == 5
    stream = TaskStream([TaskSource(load_environment(settings.environments[0]))], seed=5)
    first = [stream.task_id(key) for key in (stream.draw() for _ in range(32)) if key is not None]
    tasks = {record["task_id"] for record in rollouts(tmp_path / "run")}
    assert tasks
    assert tasks <= {*first}


@contextlib.asynccontextmanager
async def two_services() -> AsyncIterator[list[GeneratorServer]]:
    """Alike, as all that `tailrace serve` starts from the same settings are."""
    model = identify(MODEL)
    async with asyncio.TaskGroup() as group:
        services = list[GeneratorServer]()
        for _ in range(2):
            generator = Generator(lambda: make_engine(make_model()))
            server = GeneratorServer(generator, MemoryModelStateDictStore().open, "tcp://127.0.0.1:*", model=model)
            services.append(server)
            group.create_task(server.serve())
        yield services
        for server in services:
            client = GeneratorClient(server.address)
            await client.hello()
            await client.close()


async def first_tokens(services: Sequence[GeneratorServer], seed: str) -> list[tuple[int, ...]]:
    """That a run with this seed is answered first: by each of them, and by the first once it is connected again."""
    connect = ("--generator.connect", ",".join(one.address for one in services))
    settings = tiny_settings("--seed", seed, *connect, "--model.max_model_tokens", "256")  # as the model has
    sources = [
        ConnectedGenerator(name, one.address, settings, epoch="run", lend=None)
        for name, one in zip(settings.generator.replica_names, services, strict=True)
    ]
    generators, slots, changed = Generators(settings, sources), 0, asyncio.Event()

    def note(count: int) -> None:
        nonlocal slots
        slots = count
        changed.set()

    async def all_serve() -> None:
        await wait_until(changed, lambda: slots == 2 * settings.generator.concurrency)

    async def asked(server: GeneratorServer) -> tuple[int, ...]:
        return tuple((await server.generator.generate(request("r", [1, 2, 3], max_tokens=20))).token_ids.tolist())

    generators.follow_slots(note)
    async with asyncio.timeout(60):
        await all_serve()
        tokens = [await asked(server) for server in services]
        generators.release(sources[0].name, "it is to come again")
        await all_serve()
        tokens.append(await asked(services[0]))
    await generators.close()
    return tokens


async def test_generators_that_a_run_connects_to_draw_as_its_seed_says_and_each_connection_otherwise() -> None:
    async with two_services() as services:
        one, again, other = [await first_tokens(services, seed) for seed in ("5", "5", "6")]
    assert one == again
    assert len({*one, *other}) == 6
