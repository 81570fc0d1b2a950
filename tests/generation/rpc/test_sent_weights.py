"""Weights sent over a socket: all of them at first, then what changed, and all again where that is no use."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailrace.errors import CorruptData, ModelError, TransportError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.torch import TorchEngine
from tailrace.generation.rpc import messages
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.server import GeneratorServer, StandAlone
from tailrace.generation.rpc.uploads import Upload, UploadedModelStateDicts
from tailrace.records import ModelStateDictRef
from tailrace.transport.channels import create_socket_folder, encode, ipc_address
from tailrace.transport.weights.lending import ModelStateDictLender
from tailrace.transport.weights.stores import ModelStateDict, SharedMemoryModelStateDictStore
from tests.generation.engine_support import make_engine, make_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def require_equal(found: ModelStateDict, expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(bits(found[name]), bits(tensor), err_msg=name)


class Receiver:
    """The other end of a socket, without one."""

    def __init__(self, lender: ModelStateDictLender, folder: Path, piece_bytes: int = 1000) -> None:
        self.lender, self.piece_bytes = lender, piece_bytes
        self.uploads = UploadedModelStateDicts(folder)
        self.held = ""
        self.was_delta = False

    @contextmanager
    def opened(self, ref: ModelStateDictRef) -> Iterator[ModelStateDict]:
        with self.lender.lend(ref, self.held) as lent:
            upload, self.was_delta = Upload(len(lent.content), lent.digest, lent.base), bool(lent.base)
            for offset in range(0, len(lent.content), self.piece_bytes):
                uri = self.uploads.write(upload, offset, bytes(lent.content[offset : offset + self.piece_bytes]))
            self.held = lent.digest
        with self.uploads.open(ModelStateDictRef(version=lent.version, uri=uri, num_bytes=0)) as found:
            yield found


@contextmanager
def two_ends(tmp_path: Path) -> Iterator[tuple[SharedMemoryModelStateDictStore, Receiver]]:
    for name in ("trainer", "generator"):
        (tmp_path / name).mkdir(exist_ok=True)
    store, lender = SharedMemoryModelStateDictStore(tmp_path / "trainer"), ModelStateDictLender(tmp_path / "trainer")
    receiver = Receiver(lender, tmp_path / "generator")
    yield store, receiver
    lender.close()
    receiver.uploads.close()
    store.close()


def first_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {str(dtype): (torch.randn(40, 30, generator=generator) * 50).to(dtype) for dtype in DTYPES}
    shared = torch.randn(400, 7, generator=generator)
    rest = {"scalar": torch.tensor(1.5, dtype=torch.bfloat16), "empty": torch.empty(0, 4), "odd": torch.ones(3).bool()}
    return {**weights, "tied": shared, "tied too": shared, **rest}


def next_weights(weights: dict[str, Tensor], seed: int, share: float) -> dict[str, Tensor]:
    """`share` of the elements have one bit flipped, or all elements every bit; those that are tied stay so."""
    generator, changed = np.random.default_rng(seed), dict[int, Tensor]()
    for tensor in weights.values():
        if id(tensor) not in changed:
            other = tensor.detach().clone()
            raw = bits(other).reshape(-1, other.element_size())
            raw[generator.random(len(raw)) < share, 0] ^= 1
            if share == 1 and tensor.dtype is not torch.bool:
                raw ^= 254
            changed[id(tensor)] = other
    return {name: changed[id(tensor)] for name, tensor in weights.items()}


@given(st.lists(st.tuples(st.integers(0, 2**31), st.sampled_from([0.0, 1e-3, 0.03, 1.0])), min_size=1, max_size=8))
@settings(max_examples=25)
def test_weights_are_bit_equal_after_any_number_of_deltas(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, float]]
) -> None:
    with two_ends(tmp_path_factory.mktemp("weights")) as (store, receiver):
        weights = first_weights()
        for version, (seed, share) in enumerate([(0, 0.0), *steps]):
            weights = next_weights(weights, seed, share)
            with receiver.opened(store.publish(weights, version)) as found:
                assert found.version == version
                require_equal(found, weights)
            assert receiver.was_delta == (version > 0 and share < 1)
        figures = receiver.lender.figures
        assert figures.sends == len(steps) + 1
        assert figures.whole_sends == 1 + sum(share == 1 for _, share in steps)
        assert figures.sent_bytes < figures.whole_bytes or figures.sends == figures.whole_sends


def test_one_that_fell_behind_is_sent_what_changed_since_or_all(tmp_path: Path) -> None:
    """No chain: what it holds is compared with the newest, for as long as that is kept."""
    with two_ends(tmp_path) as (store, receiver):
        late = Receiver(receiver.lender, tmp_path / "late")
        (tmp_path / "late").mkdir()
        weights = [first_weights()]
        for version in range(6):
            ref = store.publish(weights[-1], version)
            with receiver.opened(ref) as found:
                require_equal(found, weights[-1])
            if version in (1, 2, 5):
                with late.opened(ref) as found:
                    require_equal(found, weights[-1])
                assert late.was_delta == (version == 2), version
            weights.append(next_weights(weights[-1], version, 0.01))
        late.uploads.close()


def test_a_version_that_the_store_skipped_is_no_matter(tmp_path: Path) -> None:
    with two_ends(tmp_path) as (store, receiver):
        weights = first_weights()
        with receiver.opened(store.publish(weights, 0)):
            pass
        for version in range(1, 5):
            weights = next_weights(weights, version, 0.01)
            ref = store.publish(weights, version)
        with receiver.opened(ref) as found:
            require_equal(found, weights)
        assert receiver.was_delta
        assert len([*(tmp_path / "trainer").iterdir()]) <= 3


def test_a_version_that_is_looked_up_late_displaces_no_newer_one(tmp_path: Path) -> None:
    """Somebody opened it before newer ones were published, and comes to read it after those."""
    with two_ends(tmp_path) as (store, receiver):
        weights = [first_weights()]
        refs = [store.publish(weights[0], 0)]
        with SharedMemoryModelStateDictStore(tmp_path / "trainer").lend_file(refs[0]):  # so that its file is kept
            for version in (1, 2):
                weights.append(next_weights(weights[-1], version, 0.01))
                refs.append(store.publish(weights[-1], version))
                with receiver.opened(refs[-1]):
                    pass
            (tmp_path / "late").mkdir()
            late = Receiver(receiver.lender, tmp_path / "late")
            with late.opened(refs[0]) as found:
                require_equal(found, weights[0])
            late.uploads.close()
        weights.append(next_weights(weights[-1], 3, 0.01))
        with receiver.opened(store.publish(weights[-1], 3)) as found:
            require_equal(found, weights[-1])
        assert receiver.was_delta  # version 2 was kept


def test_a_base_that_is_not_what_it_was_is_found_and_never_installed(tmp_path: Path) -> None:
    with two_ends(tmp_path) as (store, receiver):
        weights = first_weights()
        with receiver.opened(store.publish(weights, 0)):
            pass
        path = tmp_path / "generator" / "upload-0.safetensors"
        content = bytearray(path.read_bytes())
        content[3000] ^= 1
        path.write_bytes(content)
        changed = next_weights(weights, 1, 0.01)
        ref = store.publish(changed, 1)
        with pytest.raises(CorruptData, match="digest"), receiver.opened(ref):
            pass
        half_made = ModelStateDictRef(version=1, uri=path.name, num_bytes=0)
        with pytest.raises(CorruptData), receiver.uploads.open(half_made):
            pass
        with pytest.raises(TransportError, match="not here"), receiver.opened(ref):
            pass
        receiver.held = ""
        with receiver.opened(ref) as found:
            require_equal(found, changed)


def test_a_base_that_is_being_read_is_left_alone(tmp_path: Path) -> None:
    with two_ends(tmp_path) as (store, receiver):
        weights = first_weights()
        with receiver.opened(store.publish(weights, 0)) as before:
            changed = next_weights(weights, 1, 0.01)
            ref = store.publish(changed, 1)
            with pytest.raises(TransportError, match="being read"), receiver.opened(ref):
                pass
            receiver.held = ""
            with receiver.opened(ref) as found:
                require_equal(found, changed)
            require_equal(before, weights)


def test_a_whole_file_that_arrives_damaged_is_refused(tmp_path: Path) -> None:
    uploads = UploadedModelStateDicts(tmp_path)
    with pytest.raises(CorruptData, match="digest"):
        uploads.write(Upload(100, "0" * 32), 0, bytes(100))
    uploads.close()


def built(once: threading.Event | None = None) -> TorchEngine:
    if once is not None:
        once.wait(60)
    return make_engine(make_model())


@asynccontextmanager
async def stand_alone(
    folder: Path, build: Callable[[], TorchEngine] = built
) -> AsyncIterator[tuple[str, list[dict[str, Tensor]]]]:
    """The address of a generator that no run started, and the weights that it opens."""
    folder.mkdir()
    uploads, opened = UploadedModelStateDicts(folder), list[dict[str, Tensor]]()

    @contextmanager
    def remember(ref: ModelStateDictRef) -> Iterator[ModelStateDict]:
        with uploads.open(ref) as found:
            opened.append({name: tensor.clone() for name, tensor in found.items()})
            yield found

    sockets = create_socket_folder()
    server = GeneratorServer(
        Generator(build),
        remember,
        ipc_address(sockets, "generator"),
        stand_alone=StandAlone(lambda: Generator(build), uploads),
    )
    serving = asyncio.create_task(server.serve())
    try:
        yield server.address, opened
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        uploads.close()
        (sockets / "generator").unlink(missing_ok=True)
        sockets.rmdir()


async def test_a_client_sends_what_changed_and_all_where_the_base_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trainer").mkdir()
    store, lender = SharedMemoryModelStateDictStore(tmp_path / "trainer"), ModelStateDictLender(tmp_path / "trainer")
    weights = {name: tensor.detach().bfloat16() for name, tensor in make_model(seed=1).named_parameters()}
    async with stand_alone(tmp_path / "generator") as (address, opened):
        client = GeneratorClient(address, lend=lender.lend)
        await client.hello("first run")
        with caplog.at_level(logging.WARNING):
            for version in range(1, 7):
                weights = next_weights(weights, version, 0.01)
                if version == 4:
                    (base,) = (path for path in (tmp_path / "generator").iterdir() if path.stat().st_size)
                    base.write_bytes(bytes(base.stat().st_size))
                assert await client.load_model_state_dict(store.publish(weights, version)) == version
                require_equal(ModelStateDict(opened[-1], version), weights)
        assert caplog.text.count("is sent all weights again") == 1
        assert (lender.figures.sends, lender.figures.whole_sends) == (7, 2)
        await client.leave()
        lender.close()
        store.close()
        await resume(tmp_path / "resumed", address, opened)


async def resume(folder: Path, address: str, opened: list[dict[str, Tensor]]) -> None:
    """Another run, whose versions begin lower, with a generator that holds the weights of the one before."""
    folder.mkdir()
    store, lender = SharedMemoryModelStateDictStore(folder), ModelStateDictLender(folder)
    weights = {name: tensor.detach().bfloat16() for name, tensor in make_model(seed=2).named_parameters()}
    client = GeneratorClient(address, lend=lender.lend)
    await client.hello("second run")
    for version in (2, 3):
        weights = next_weights(weights, version, 0.01)
        assert await client.load_model_state_dict(store.publish(weights, version)) == version
        require_equal(ModelStateDict(opened[-1], version), weights)
    assert (lender.figures.sends, lender.figures.whole_sends) == (2, 1)
    await client.leave()
    lender.close()
    store.close()


async def test_a_generator_that_cannot_be_built_for_one_run_is_built_for_the_next(tmp_path: Path) -> None:
    failures: list[Exception | None] = [None, ModelError("the folder is away"), None]

    def build() -> TorchEngine:
        if (failure := failures.pop(0)) is not None:
            raise failure
        return built()

    (tmp_path / "trainer").mkdir()
    store, lender = SharedMemoryModelStateDictStore(tmp_path / "trainer"), ModelStateDictLender(tmp_path / "trainer")
    ref = store.publish({name: tensor.detach() for name, tensor in make_model(seed=1).named_parameters()}, 1)
    async with stand_alone(tmp_path / "generator", build) as (address, _):
        for run in ("first", "second", "third"):
            client = GeneratorClient(address, lend=lender.lend)
            if run == "second":
                with pytest.raises(ModelError, match="the folder is away"):
                    await client.hello(run)
            else:
                await client.hello(run)
                assert await client.load_model_state_dict(ref) == 1
            await client.leave()
    assert failures == []
    lender.close()
    store.close()


async def said_hello(address: str, run: str) -> zmq.asyncio.Socket:
    """A client of a run whose hello was taken, and waits for the engine to be built."""
    peer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    peer.connect(address)
    await peer.send(encode(messages.HelloCall(call_id=0, protocol=messages.PROTOCOL, epoch=run)))
    await peer.send(b"nonsense")
    assert b"CorruptData" in await peer.recv()  # which is answered at once, after the hello was taken
    return peer


async def test_of_runs_that_wait_for_the_same_generator_one_is_let_in(tmp_path: Path) -> None:
    may_be_built = threading.Event()
    async with stand_alone(tmp_path / "generator", partial(built, may_be_built)) as (address, _), asyncio.timeout(60):
        peers = [await said_hello(address, run) for run in ("first", "second", "third")]
        may_be_built.set()
        answers = [await peer.recv() for peer in peers]
        for peer in peers:
            peer.close(linger=0)
    assert [b"WelcomeReply" in answer for answer in answers] == [True, False, False]
    assert [b"in use by another run" in answer for answer in answers] == [False, True, True]


async def test_a_run_that_died_as_it_waited_for_a_generator_keeps_no_other_out(tmp_path: Path) -> None:
    may_be_built = threading.Event()
    async with stand_alone(tmp_path / "generator", partial(built, may_be_built)) as (address, _), asyncio.timeout(60):
        (await said_hello(address, "first")).close(linger=0)
        next_one = await said_hello(address, "next")
        may_be_built.set()
        assert b"WelcomeReply" in await next_one.recv()
        next_one.close(linger=0)


async def test_a_generator_that_was_started_again_is_sent_all(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    store, lender = SharedMemoryModelStateDictStore(tmp_path / "trainer"), ModelStateDictLender(tmp_path / "trainer")
    weights = {name: tensor.detach().bfloat16() for name, tensor in make_model(seed=1).named_parameters()}
    for life in (1, 2):
        async with stand_alone(tmp_path / f"generator {life}") as (address, opened):
            client = GeneratorClient(address, lend=lender.lend)
            await client.hello("run")
            for version in (2 * life, 2 * life + 1):
                weights = next_weights(weights, version, 0.01)
                await client.load_model_state_dict(store.publish(weights, version))
                require_equal(ModelStateDict(opened[-1], version), weights)
            await client.leave()
    assert (lender.figures.sends, lender.figures.whole_sends) == (4, 2)
    lender.close()
    store.close()


async def test_without_deltas_all_is_sent_each_time(tmp_path: Path) -> None:
    with two_ends(tmp_path) as (store, _):
        lender = ModelStateDictLender(tmp_path / "trainer", deltas=False)
        receiver = Receiver(lender, tmp_path / "generator")
        weights = first_weights()
        for version in range(3):
            with receiver.opened(store.publish(weights, version)) as found:
                require_equal(found, weights)
        assert lender.figures.whole_sends == lender.figures.sends == 3
        assert lender.figures.compared_bytes == 0
