"""Generators in processes of their own, without a model, ask to join the generators of a run, and leave them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typing_extensions import override

from tailrace.config import RunSettings, load_settings
from tailrace.errors import ModelError, SettingsError
from tailrace.free_ports import free_port
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.rpc.client import GeneratorClient, ReportListener
from tailrace.generation.rpc.messages import PROTOCOL, WelcomeReply
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.models.identity import ModelIdentity
from tailrace.records import Completion, FinishReason, GenerationRequest, SamplingParams
from tailrace.run.generators import EndedReplica, Generators, ReplicaListener, ReplicaSource
from tailrace.run.join_requests import Announce, Apply, JoinClient, JoinHandler, JoinPlace, Offer, listen_for_generators
from tailrace.run.joined_serving import JoinOptions, release, serve_run
from tailrace.run.transports import ReplicaConnection
from tailrace.transport.channels import ipc_address
from tailrace.transport.keys import write_keys
from tests.run.runs import ROOT

TOKENS = 400
CHUNK_TOKENS = 8


class OwnGenerator(ReplicaSource):
    """One of the run's own, in this process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._address = name, ipc_address(folder, name)
        self._generator: Generator | None = None

    @override
    async def open(self, on_report: ReportListener) -> ReplicaConnection:
        self._generator = Generator(lambda: SimulatedEngine(slots=4, step_s=0.002, chunk_tokens=CHUNK_TOKENS))
        server = GeneratorServer(self._generator, lambda ref: pytest.fail("no weights"), self._address)
        self._serving = asyncio.create_task(server.serve())
        return GeneratorClient(self._address, name=self.name, on_report=on_report)

    @override
    async def hello(self, client: ReplicaConnection, seed: int) -> WelcomeReply:
        return await client.hello()

    @override
    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        return EndedReplica(failure, by_itself=True)

    @override
    async def close(self, client: ReplicaConnection) -> None:
        await client.close()
        await self._serving


class News(ReplicaListener):
    """Who came and went."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.changed = asyncio.Event()

    @override
    def replica_joined(self, name: str, serving: int) -> None:
        self._tell(f"{name} joined, {serving} serve")

    @override
    def replica_left(self, name: str, serving: int, *, reason: str, in_order: bool) -> None:
        self._tell(f"{name} {'left' if in_order else 'was lost'}, {serving} serve")

    def _tell(self, news: str) -> None:
        self.told.append(news)
        self.changed.set()

    async def hear(self, news: str, times: int = 1) -> None:
        """Wait for it."""
        async with asyncio.timeout(60):
            while self.told.count(news) < times:
                self.changed.clear()
                await self.changed.wait()


@dataclass
class World:
    """A run's generators, which others may join."""

    generators: Generators
    folder: Path
    news: News
    guests: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def guest(self, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.simulated_guest", *(arguments or (str(self.folder),))),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        self.guests.append(process)
        return process

    @property
    def place(self) -> JoinPlace:
        return msgspec.json.decode((self.folder / "join.json").read_bytes(), type=JoinPlace)

    def ask(self, count: int) -> list[asyncio.Task[Completion]]:
        """Requests of `TOKENS` tokens each."""
        return [asyncio.create_task(self.generators.router.generate(_request(f"r{number}"))) for number in range(count)]


def _request(name: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,  # type: ignore[arg-type]
        session_id=name,  # type: ignore[arg-type]
        group_id=name,  # type: ignore[arg-type]
        prompt_token_ids=np.asarray([1, 2, 3], np.int32),
        sampling=SamplingParams(max_tokens=TOKENS),
    )


def elastic_settings(*overrides: str) -> RunSettings:
    policy = ("--generator.router.policy", "least_loaded", "--generator.router.report_every_s", "0.05")
    return load_settings("quickstart", ["--generator.replicas", "{min = 1, max = 2}", *policy, *overrides])


@asynccontextmanager
async def world(tmp_path: Path, *overrides: str) -> AsyncIterator[World]:
    settings, news, folder = elastic_settings(*overrides), News(), tmp_path / "run"
    folder.mkdir()
    generators = Generators(settings, [OwnGenerator("generator-0", tmp_path)])
    generators.tell(news)
    handler = JoinHandler(settings, generators, "epoch", role=b"", lend=lambda ref, held: pytest.fail("no weights"))
    here = World(generators, folder, news)
    try:
        async with listen_for_generators(handler, folder / "join.json"):
            await generators.serving()
            yield here
    finally:
        await generators.close()
        for guest in here.guests:
            if guest.returncode is None:
                guest.kill()
                await guest.wait()


async def told(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit status, and what it printed."""
    async with asyncio.timeout(60):
        printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


async def test_a_guest_that_is_asked_to_stop_leaves_in_order_and_nothing_is_sampled_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        slots: list[int] = []
        here.generators.follow_slots(slots.append)
        guest = await here.guest()
        await here.news.hear("generator-1 joined, 2 serve")
        calls = here.ask(8)
        router = here.generators.router
        async with asyncio.timeout(60):
            while router.replicas[1].requests < 3:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        guest.send_signal(signal.SIGTERM)
        await here.news.hear("generator-1 left, 1 serve")
        done = await asyncio.gather(*calls)
        assert {(one.num_tokens, one.finish_reason) for one in done} == {(TOKENS, FinishReason.LENGTH)}
        assert await told(guest) == (
            143,
            "joins the run quickstart as generator-1: its engine is built\nserves the run\n"
            "has left the run quickstart: generator-1 left: it was asked to stop\n",
        )
        assert slots == [64, 68, 64]
        assert not any(replica.failovers for replica in router.replicas)


async def test_a_guest_that_is_killed_costs_a_chunk_of_each_request_and_another_may_come(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        guest = await here.guest()
        await here.news.hear("generator-1 joined, 2 serve")
        calls = here.ask(8)
        async with asyncio.timeout(60):
            while here.generators.router.replicas[1].requests < 3:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        guest.kill()
        await here.news.hear("generator-1 was lost, 1 serve")
        second = await here.guest()
        assert {one.num_tokens for one in await asyncio.gather(*calls)} == {TOKENS}
        await here.news.hear("generator-1 joined, 2 serve", times=2)
        assert here.generators.metrics() == {
            "generator/replicas": 2,
            "generator/joins": 3,
            "generator/leaves": 0,
            "generator/losses": 1,
        }
        third = await here.guest()
        status, printed = await told(third)
        assert (status, printed) == (
            2,
            "--join: the run quickstart has 2 generators, as many as generator.replicas.max allows\n",
        )
        await release(str(here.folder), "generator-1", None)
        await here.news.hear("generator-1 left, 1 serve")
        assert (await told(second))[0] == 0
        with pytest.raises(SettingsError, match=r"^leave: no generator generator-1 serves the run quickstart"):
            await release(str(here.folder), "generator-1", None)


async def test_a_run_that_is_over_ends_its_guests(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        guest = await here.guest()
        await here.news.hear("generator-1 joined, 2 serve")
        await here.generators.close()
        assert (await told(guest))[0] == 0


async def test_a_guest_from_elsewhere_needs_the_key_of_the_run(tmp_path: Path) -> None:
    key, other = tmp_path / "key.json", tmp_path / "other.json"
    write_keys(other, "test")
    elsewhere = ("--generator.join_address", "tcp://127.0.0.1:0", "--generator.join_key", str(key))
    async with world(tmp_path, *elsewhere) as here:
        listens = f"tcp://127.0.0.1:{free_port()}"
        status, printed = await told(await here.guest(here.place.elsewhere, str(other), listens))
        assert (status, "--key: " in printed) == (2, True), printed
        guest = await here.guest(here.place.elsewhere, str(key), listens)
        await here.news.hear("generator-1 joined, 2 serve")
        assert {one.num_tokens for one in await asyncio.gather(*here.ask(8))} == {TOKENS}
        guest.send_signal(signal.SIGTERM)
        assert (await told(guest))[0] == 143


def _another(offer: Offer) -> Announce:
    return Announce(
        offer.name, offer.life, "ipc:///nowhere", ModelIdentity("other", {"num_hidden_layers": 99}), 4, 9999
    )


def _other_weights(offer: Offer) -> Announce:
    return msgspec.structs.replace(_another(offer), model=ModelIdentity("other", {}, "digest"))


def _unsafe(offer: Offer) -> Announce:
    return msgspec.structs.replace(_another(offer), address="tcp://10.0.0.1:5757")


def _malformed(offer: Offer) -> Announce:
    return msgspec.structs.replace(_another(offer), address="tcp://[10.0.0.1:5757")


@pytest.mark.parametrize(
    ("announced", "why"),
    [
        (_another, "serves other, another model than model.name = bundled:quickstart (num_hidden_layers is 99 there"),
        (_other_weights, "serves other, not the weights of model.name = bundled:quickstart"),
        (_malformed, "--address = tcp://[10.0.0.1:5757 is no address"),
        (_unsafe, "can be reached from other machines: give --key as well"),
    ],
)
async def test_another_model_is_refused_and_its_place_is_free_again(
    tmp_path: Path, announced: Callable[[Offer], Announce], why: str
) -> None:
    async with world(tmp_path) as here, JoinClient(here.place.here) as client:
        for _ in range(3):
            offer = await client.ask(Apply(PROTOCOL))
            assert isinstance(offer, Offer)
            with pytest.raises(SettingsError) as raised:
                await client.ask(announced(offer))
            assert why in str(raised.value)


async def test_a_generator_that_fails_before_it_comes_keeps_no_place(tmp_path: Path) -> None:
    async with world(tmp_path) as here, JoinClient(here.place.here) as client:
        with pytest.raises(ModelError, match="nowhere"):
            await serve_run(JoinOptions(str(here.folder), model=str(tmp_path / "nowhere")), print)
        assert isinstance(await client.ask(Apply(PROTOCOL)), Offer)
        with pytest.raises(SettingsError, match="has 2 generators, 1 of them on the way, as many as"):
            await client.ask(Apply(PROTOCOL))


@pytest.mark.parametrize(
    ("run", "address", "why"),
    [
        ("tcp://10.0.0.5:5800", None, r"--address: the run at tcp://10\.0\.0\.5:5800 connects to this generator"),
        ("tcp://127.0.0.1:5800", "tcp://0.0.0.0:5757", "stands for all addresses of this host"),
        ("tcp://127.0.0.1:5800", "tcp://[10.0.0.7:5757", "is no address: write tcp://HOST:PORT"),
    ],
)
async def test_one_that_its_run_could_not_connect_to_is_refused_before_it_asks(
    tmp_path: Path, run: str, address: str | None, why: str
) -> None:
    write_keys(tmp_path / "key", "test")
    with pytest.raises(SettingsError, match=why):
        await serve_run(JoinOptions(run, tmp_path / "key", address), print, waits_s=0.0)


async def test_another_version_of_the_protocol_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here, JoinClient(here.place.here) as client:
        with pytest.raises(
            SettingsError, match=f"speaks version {PROTOCOL} of the protocol, this generator version 10"
        ):
            await client.ask(Apply(10))
        assert here.generators.pool.present == 1


async def test_a_run_that_takes_nobody_in_and_one_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no run takes generators of this host in"):
        await serve_run(JoinOptions("nobody", runs=tmp_path), print, waits_s=0.0)
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / "config.toml").write_text(
        'name = "fixed"\nmax_steps = 1\n[model]\nname = "bundled:quickstart"\n[generator]\nreplicas = 2\n'
        '[[environments]]\nname = "sort-words"\n'
    )
    with pytest.raises(SettingsError, match=r"takes no generators in: it has generator\.replicas = 2"):
        await serve_run(JoinOptions(str(tmp_path / "fixed")), print, waits_s=0.0)
    for address, reason in (("tcp://10.0.0.5", "is no address"), ("tcp://10.0.0.5:5800", "give --key as well")):
        with pytest.raises(SettingsError, match=f"--join = {address} .*{reason}"):
            await serve_run(JoinOptions(address), print, waits_s=0.0)
