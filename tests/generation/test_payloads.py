"""What engines record on its way to whoever trains on it: through the generator, over its socket, into branches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tailrace.errors import CorruptData, TransportError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.messages import CompletionReply, unpack_payloads, unpack_replies
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.records import Branch, Completion, FinishReason, Generate, PayloadChunk, PayloadRef
from tailrace.records.payload_table import PayloadTableBuilder
from tailrace.transport.channels import create_socket_folder, encode, ipc_address
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.slab_store import SlabPayloadStore
from tailrace.transport.payloads.store import MemoryPayloadStore, PayloadStore
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.generation.engine_support import make_engine, request
from tests.support.expert_models import expert_model, plain_routing

PROMPT = [3, 5, 7, 9, 11]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return expert_model("qwen3-moe")


async def ask(
    generate: Generate,
    branch: Branch,
    max_tokens: int = 20,
    *,
    name: str = "r",
    prefix: Completion | None = None,
    owner: str | None = "rollout",
) -> Completion:
    return await generate(
        request(
            name,
            branch.token_ids,
            session="branch",
            group="g",
            owner=owner,
            prefix=prefix,
            temperature=0,
            max_tokens=max_tokens,
        )
    )


def started(token_ids: list[int]) -> Branch:
    branch = Branch()
    branch.extend_context(token_ids)
    return branch


def assert_recorded(branch: Branch, model: PreTrainedModel, open_payload: Callable[[PayloadRef], NDArray]) -> None:
    """All positions but the last one read as the model chooses."""
    builder = PayloadTableBuilder()
    builder.add(branch.num_tokens, branch.payload_chunks)
    read = builder.table().read(open_payload)
    assert read is not None
    assert (read[-1] == 255).all()
    expected = plain_routing(model, branch.token_ids.tolist()).numpy()
    np.testing.assert_array_equal(np.sort(read[:-1], axis=-1), np.sort(expected[:-1], axis=-1))


@asynccontextmanager
async def generating(
    model: PreTrainedModel, payloads: PayloadStore | None, **options: object
) -> AsyncIterator[Generator]:
    async with Generator(
        lambda: make_engine(model, return_routed_experts=True, **options), payloads=payloads
    ) as generator:
        yield generator


async def test_a_branch_of_two_turns_knows_the_experts_of_all_that_was_forwarded(model: PreTrainedModel) -> None:
    store = MemoryPayloadStore()
    async with generating(model, store) as generator:
        branch = started(PROMPT)
        branch.extend_completion(await ask(generator.generate, branch, 6, name="first"))
        branch.extend_context([1, 2])
        branch.extend_completion(await ask(generator.generate, branch, 6, name="second"))
        assert len({chunk.ref for chunk in branch.payload_chunks} - {None}) == 2
        assert_recorded(branch, model, store.open)


async def test_a_completion_that_was_interrupted_keeps_what_its_parts_recorded(model: PreTrainedModel) -> None:
    store = MemoryPayloadStore()
    async with generating(model, store, chunk_tokens=1) as generator:
        branch, begun = started(PROMPT), asyncio.Event()
        whole = request("r", branch.token_ids, session="branch", group="g", temperature=0, max_tokens=60)
        asking = asyncio.create_task(generator.generate(whole, lambda _: begun.set()))
        await begun.wait()
        await generator.interrupt(["r"])
        branch.extend_completion(await generator.generate(replace(whole, prefix=await asking)))
        assert_recorded(branch, model, store.open)


async def test_a_completion_that_goes_on_elsewhere_keeps_what_its_prefix_recorded(model: PreTrainedModel) -> None:
    store = MemoryPayloadStore()
    async with generating(model, store) as one, generating(model, store) as other:
        branch = started(PROMPT)
        prefix = await ask(one.generate, branch, 5)
        completion = await ask(other.generate, branch, 12, prefix=prefix)
        assert completion.routed_experts[:1] == prefix.routed_experts
        branch.extend_completion(completion)
        assert_recorded(branch, model, store.open)


async def test_without_a_store_nothing_is_kept(model: PreTrainedModel) -> None:
    async with generating(model, None) as generator:
        assert (await ask(generator.generate, started(PROMPT))).routed_experts == ()


class RecordingStore(MemoryPayloadStore):
    """Knows all that was put."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: list[PayloadRef] = []

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        self.refs.append(ref := super().put(array))
        return ref


class FullStore(MemoryPayloadStore):
    """Has no room."""

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        raise TransportError("no room")


async def test_a_full_store_costs_no_completion(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    async with generating(model, FullStore()) as generator:
        completion = await ask(generator.generate, started(PROMPT))
    assert (completion.num_tokens, completion.routed_experts) == (20, ())
    assert "1 payloads were not kept: no room" in caplog.text


@asynccontextmanager
async def served(
    model: PreTrainedModel, puts: PayloadStore, accounts: PayloadAccounts, *, by_value: bool
) -> AsyncIterator[GeneratorClient]:
    folder = create_socket_folder()
    address = ipc_address(folder, "generator")
    generator = Generator(lambda: make_engine(model, return_routed_experts=True), payloads=puts)
    forwarded = puts if isinstance(puts, MemoryPayloadStore) else None
    server = GeneratorServer(generator, MemoryModelStateDictStore().open, address, forwarded=forwarded)
    serving = asyncio.create_task(server.serve())
    client = GeneratorClient(address, payloads=accounts, by_value=by_value)
    try:
        await client.hello()
        yield client
    finally:
        await client.close()
        await serving
        (folder / "generator").unlink(missing_ok=True)
        folder.rmdir()


@pytest.mark.parametrize("by_value", [False, True])
async def test_over_a_socket_a_reference_travels_or_the_bytes(
    tmp_path: Path, model: PreTrainedModel, by_value: bool
) -> None:
    puts = RecordingStore() if by_value else SlabPayloadStore(tmp_path, writer="generator")
    ledger, trainer = SlabPayloadStore(tmp_path, writer="orchestrator"), SlabPayloadStore(tmp_path)
    accounts = PayloadAccounts(ledger)
    async with served(model, puts, accounts, by_value=by_value) as client:
        branch = started(PROMPT)
        prefix = await ask(client.generate, branch, 5, name="first")
        branch.extend_completion(await ask(client.generate, branch, 40, name="second", prefix=prefix))
        assert_recorded(branch, model, trainer.open)
        sizes = {chunk.ref.uri: chunk.ref.num_bytes for chunk in branch.payload_chunks if chunk.ref is not None}
        assert accounts.figures.held_bytes == sum(sizes.values()) > 0
        if by_value:
            assert isinstance(puts, RecordingStore)
            assert not any(map(puts.holds, puts.refs))
        accounts.release("rollout")
        assert accounts.figures.held_bytes == 0
    await accounts.close()


@pytest.mark.parametrize("by_value", [False, True])
async def test_of_a_request_without_an_owner_nothing_is_recorded(
    tmp_path: Path, model: PreTrainedModel, by_value: bool
) -> None:
    puts = RecordingStore() if by_value else SlabPayloadStore(tmp_path, writer="generator")
    accounts = PayloadAccounts(SlabPayloadStore(tmp_path, writer="orchestrator"))
    async with served(model, puts, accounts, by_value=by_value) as client:
        judged = await ask(client.generate, started(PROMPT), owner=None)
        assert (judged.num_tokens, judged.routed_experts) == (20, ())
        assert accounts.figures.recorded_bytes == 0
        assert not puts.refs if isinstance(puts, RecordingStore) else not list(tmp_path.iterdir())
    await accounts.close()


async def test_what_comes_for_a_request_that_was_cancelled_is_released(tmp_path: Path, model: PreTrainedModel) -> None:
    accounts = PayloadAccounts(SlabPayloadStore(tmp_path))
    async with served(model, SlabPayloadStore(tmp_path, writer="generator"), accounts, by_value=False) as client:
        asking = [asyncio.create_task(ask(client.generate, started(PROMPT), 20 + n, name=str(n))) for n in range(12)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        accounts.release("rollout")
        await ask(client.generate, started(PROMPT), 1, name="the last one, which is answered after all others")
        assert accounts.figures.held_bytes == 0
        assert accounts.figures.recorded_bytes > 0
    await accounts.close()


def reply_of(chunks: tuple[PayloadChunk, ...], announced: int = 0) -> CompletionReply:
    nothing = np.empty(0, np.int32)
    completion = Completion(nothing, np.empty(0, np.float32), nothing, FinishReason.STOP, routed_experts=chunks)
    return CompletionReply(call_id=1, completion=completion, payload_frames=announced)


@pytest.mark.parametrize(
    ("ref", "announced", "frames", "why"),
    [
        (PayloadRef("memory:1", "uint8", (2, 2, 2)), 1, [bytes(7)], "routed experts of 7 bytes came for "),
        (PayloadRef("memory:1", "object", (2, 2, 2)), 1, [bytes(64)], r"said to be 'object' of shape \[2, 2, 2\]"),
        (PayloadRef("memory:1", "uint8", (-2, -2, 2)), 1, [bytes(8)], r"of shape \[-2, -2, 2\]: no array is"),
        (PayloadRef("memory:1", "uint8", (2**40, 2**40, 2**40)), 1, [bytes(8)], "routed experts of 8 bytes came for "),
        (None, 1, [bytes(8)], "routed experts of 8 bytes came for None"),
        (PayloadRef("memory:1", "uint8", (2, 2, 2)), 2, [bytes(8)], "announced 2; 1 came"),
        (PayloadRef("memory:1", "uint8", (2, 2, 2)), -1, [bytes(8)], "announced -1; 1 came"),
    ],
)
def test_payloads_that_are_not_what_was_announced_are_corrupt(
    ref: PayloadRef | None, announced: int, frames: list[bytes], why: str
) -> None:
    chunks = (PayloadChunk(0, 2, ref),)
    with pytest.raises(CorruptData, match=why):
        unpack_payloads(reply_of(chunks, announced), frames)


@pytest.mark.parametrize(
    "chunk",
    [
        PayloadChunk(-1, 1, PayloadRef("shm:w-1.slab@1+64", "uint8", (2, 2, 2))),
        PayloadChunk(2, 1, PayloadRef("shm:w-1.slab@1+64", "uint8", (2, 2, 2))),
        PayloadChunk(0, 3, PayloadRef("shm:w-1.slab@1+64", "uint8", (2, 2, 2))),
        PayloadChunk(0, 2, PayloadRef("shm:w-1.slab@1+64", "uint8", (2, 2, 2)), 1),
        PayloadChunk(0, 2, PayloadRef("shm:w-1.slab@1+64", "uint8", (2, 2, 2)), -1),
        PayloadChunk(0, 2, PayloadRef("shm:w-1.slab@1+64", "uint8", (2,))),
        PayloadChunk(0, 2),
    ],
)
def test_a_chunk_beyond_its_payload_is_corrupt(chunk: PayloadChunk) -> None:
    with pytest.raises(CorruptData, match=re.escape(f"{chunk} is not within its payload")):
        unpack_replies(encode(reply_of((chunk,))))


async def test_a_generator_of_another_host_cannot_name_payloads_of_ours(tmp_path: Path, model: PreTrainedModel) -> None:
    ours = SlabPayloadStore(tmp_path, writer="orchestrator")
    victim, accounts = ours.put(np.zeros((4, 3, 2), np.uint8)), PayloadAccounts(ours)
    async with served(model, Lying(victim), accounts, by_value=True) as client:
        completion = await ask(client.generate, started(PROMPT), 5)
    assert completion.routed_experts == ()
    assert accounts.figures.held_bytes == 0
    await accounts.close()
    np.testing.assert_array_equal(ours.open(victim), 0)


class Lying(SlabPayloadStore):
    """What it puts it says to be somewhere else."""

    def __init__(self, ref: PayloadRef) -> None:
        super().__init__(Path())
        self._ref = ref

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        return msgspec.structs.replace(self._ref, shape=array.shape)
