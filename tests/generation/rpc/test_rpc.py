from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from typing_extensions import override

from tailrace.errors import CorruptData, EngineFailed, ModelError, RequestRefused, TransportError
from tailrace.generation.completions import joined
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import Engine, FailureListener, SampledTokens
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.rpc import messages
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.records import (
    Completion,
    FinishReason,
    ModelStateDictRef,
    Supports,
)
from tailrace.transport.channels import create_socket_folder, encode, ipc_address
from tailrace.transport.weights.stores import MemoryModelStateDictStore, ModelStateDict
from tests.generation.engine_support import (
    Brake,
    assert_told,
    forward_logprobs,
    greedy_reference,
    make_engine,
    make_model,
    request,
    restricted_logprobs,
)


@asynccontextmanager
async def served(
    model,
    store: MemoryModelStateDictStore | None = None,
    brake: Brake | None = None,
    policy: WeightPolicy = DEFAULT_WEIGHT_POLICY,
    new_engine: Callable[[], Engine] | None = None,
) -> AsyncIterator[GeneratorClient]:
    folder = create_socket_folder()
    address = ipc_address(folder, "generator")
    generator = Generator(new_engine or (lambda: make_engine(model, brake)), policy)
    server = GeneratorServer(generator, (store or MemoryModelStateDictStore()).open, address)
    serving = asyncio.create_task(server.serve())
    client = GeneratorClient(address)
    try:
        await client.hello()
        yield client
    finally:
        await GeneratorClient(address).close()
        await asyncio.wait_for(serving, 10)
        await client.close()
        (folder / "generator").unlink(missing_ok=True)
        folder.rmdir()


def ask(client: GeneratorClient, name: str, prompt: list[int], **sampling: object) -> asyncio.Task[Completion]:
    return asyncio.create_task(client.generate(request(name, prompt, **sampling)))


async def running(client: GeneratorClient, count: int) -> None:
    """Wait until so many requests run."""
    while (await client.hello()).statistics.running != count:  # noqa: ASYNC110 - statistics have no event
        await asyncio.sleep(0.001)


async def test_completions_cross_the_socket_unchanged(model) -> None:
    async with served(model) as client:
        done = await asyncio.gather(*(ask(client, str(i), [i + 1, 2], temperature=0, max_tokens=9) for i in range(6)))
        for i, completion in enumerate(done):
            assert completion.token_ids.tolist() == greedy_reference(model, [i + 1, 2], 9)
            expected = forward_logprobs(model, [i + 1, 2], completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert completion.policy_versions.tolist() == [0] * 9
            assert completion.finish_reason is FinishReason.LENGTH
            assert completion.metrics["cached_prompt_tokens"] == 0
        assert (await client.hello()).statistics.sampled_tokens_total == 54


async def test_a_prefix_crosses_the_socket(model) -> None:
    async with served(model) as client:
        whole = await ask(client, "whole", [1, 2, 3], temperature=0, max_tokens=12)
        prefix = Completion(whole.token_ids[:5], whole.logprobs[:5], whole.policy_versions[:5], FinishReason.ABORTED)
        continued = await client.generate(
            request("rest", [1, 2, 3], session="s", group="g", prefix=prefix, temperature=0, max_tokens=12)
        )
        assert continued.token_ids.tolist() == whole.token_ids.tolist()


async def test_supports_cross_the_socket_in_chunks_completions_and_prefixes(model) -> None:
    sampling = {"top_p": 0.9, "returns_supports": True}
    async with served(model) as client:
        assert (await client.hello()).limits.returns_supports
        chunks: list[Completion] = []
        whole = await client.generate(request("r", [1, 2, 3], max_tokens=100, **sampling), chunks.append)
        assert len(chunks) == 2
        assert_told(chunks, whole)
        prefix = joined(None, chunks[:1], FinishReason.ABORTED)
        continued = await client.generate(request("rest", [1, 2, 3], prefix=prefix, max_tokens=100, **sampling))
        for one in (whole, continued):
            expected = restricted_logprobs(model, [1, 2, 3], one)
            np.testing.assert_allclose(one.logprobs, expected, rtol=0, atol=1e-4)


def test_supports_of_other_tokens_are_no_reply() -> None:
    one = Supports(np.array([4], np.int32), np.array([1], np.int32))
    columns = np.array([4], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    reply = messages.CompletionReply(call_id=1, completion=Completion(*columns, FinishReason.STOP, supports=one))
    (read,) = messages.unpack_replies(encode(reply))
    assert isinstance(read, messages.CompletionReply)
    assert read.completion.supports is not None
    assert read.completion.supports.token_ids.tolist() == [4]
    content = msgspec.msgpack.decode(encode(reply))
    for counts in ([2], [1, 0], [-1]):
        content["completion"]["supports"]["counts"] = np.array(counts, np.int32).tobytes()
        with pytest.raises(CorruptData, match="supports"):
            messages.unpack_replies(msgspec.msgpack.encode(content))


async def test_published_weights_are_installed_by_reference(model) -> None:
    store, newer = MemoryModelStateDictStore(), make_model(seed=1)
    async with served(model, store) as client:
        ref = store.publish(newer.state_dict(), 3)
        assert await client.load_model_state_dict(ref) == 3
        done = await ask(client, "r", [1, 2], max_tokens=8)
        assert set(done.policy_versions.tolist()) == {3}
        np.testing.assert_allclose(done.logprobs, forward_logprobs(newer, [1, 2], done.token_ids), atol=1e-4)


class LendingStore(MemoryModelStateDictStore):
    """Tells when it has lent weights, and when it has them back."""

    def __init__(self) -> None:
        super().__init__()
        self.lent, self.returned = threading.Event(), threading.Event()

    @contextmanager
    @override
    def open(self, ref: ModelStateDictRef) -> Iterator[ModelStateDict]:
        with super().open(ref) as tensors:
            self.lent.set()
            try:
                yield tensors
            finally:
                self.returned.set()


async def test_weights_that_wait_for_a_drain_are_withdrawn_when_their_client_cancels(model) -> None:
    store, brake = LendingStore(), Brake()
    async with served(model, store, brake, WeightPolicy("drain", "reset_prefix")) as client:
        long = ask(client, "long", [1, 2], max_tokens=100)
        await running(client, 1)
        load = asyncio.create_task(client.load_model_state_dict(store.publish(model.state_dict(), 1)))
        assert await asyncio.to_thread(store.lent.wait, 20)
        load.cancel()
        assert await asyncio.to_thread(store.returned.wait, 20)
        brake.let_go()
        assert set((await long).policy_versions.tolist()) == {0}
        assert set((await ask(client, "later", [1], max_tokens=2)).policy_versions.tolist()) == {0}
        assert await client.load_model_state_dict(store.publish(model.state_dict(), 2)) == 2


async def test_errors_keep_their_type(model) -> None:
    store = MemoryModelStateDictStore()
    async with served(model, store) as client:
        with pytest.raises(RequestRefused, match="request bad has an empty prompt"):
            await ask(client, "bad", [])
        with pytest.raises(ModelError, match="lacks weights"):
            await client.load_model_state_dict(store.publish({}, 1))
        with pytest.raises(TransportError, match=r"no model state dict of version 9 in this store \(memory:nowhere\)"):
            await client.load_model_state_dict(ModelStateDictRef(version=9, uri="memory:nowhere", num_bytes=0))
        assert (await ask(client, "good", [1], max_tokens=2)).num_tokens == 2


async def test_an_engine_that_cannot_be_built_is_told_to_whoever_says_hello() -> None:
    def factory() -> Engine:
        raise ModelError("no such model")

    folder = create_socket_folder()
    generator = Generator(factory)
    server = GeneratorServer(generator, MemoryModelStateDictStore().open, ipc_address(folder, "generator"))
    serving, client = asyncio.create_task(server.serve()), GeneratorClient(server.address)
    with pytest.raises(ModelError, match="no such model"):
        await client.hello()
    with pytest.raises(EngineFailed, match="could not be built: ModelError: no such model"):
        await ask(client, "r", [1])
    await client.close()
    await asyncio.wait_for(serving, 20)
    await generator.close()
    (folder / "generator").unlink(missing_ok=True)
    folder.rmdir()


async def test_a_call_that_cannot_be_read_costs_only_that_call(model) -> None:
    def call(call_id: int, name: str, **fields: object) -> bytes:
        asked = {"request_id": name, "session_id": name, "group_id": name, "sampling": {}, **fields}
        return msgspec.msgpack.encode({"type": "GenerateCall", "call_id": call_id, "request": asked})

    token, odd = bytes(4), {"token_ids": bytes(8), "logprobs": bytes(4), "policy_versions": bytes(8)}
    async with served(model) as client:
        good = ask(client, "good", [1, 2], max_tokens=200)
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.connect(client.address)
        for number, (message, said) in enumerate(
            (
                (call(0, "a", prompt_token_ids=token, sampling={"top_kk": 1}), b"unknown field `top_kk`"),
                (call(1, "b"), b"missing required field `prompt_token_ids`"),
                (call(2, "c", prompt_token_ids=bytes(3)), b"at `$.request.prompt_token_ids`"),
                (
                    call(3, "d", prompt_token_ids=token, prefix={"finish_reason": "aborted", **odd}),
                    b"must be of one length",
                ),
                (call(4, "e", prompt_token_ids=token, sampling={"max_tokens": 0}), b"request e"),
                (call(5, "f", prompt_token_ids=bytes([255] * 4)), b"request f"),
                (call(6, "g", prompt_token_ids="abcd"), b"at `$.request.prompt_token_ids`"),
            )
        ):
            await stranger.send(message)
            answer = await asyncio.wait_for(stranger.recv(), 20)
            reply = msgspec.msgpack.decode(answer)
            assert (reply["type"], reply["call_id"]) == ("ErrorReply", number)
            assert reply["kind"] in {"CorruptData", "RequestRefused"}
            assert said in answer
        stranger.close(linger=0)
        assert (await good).num_tokens == 200


async def test_a_call_that_cannot_be_read_costs_no_other_of_its_message(model) -> None:
    async with served(model) as client:
        asked = [ask(client, f"good {number}", [1, 2], max_tokens=5) for number in range(2)]
        asked.insert(1, ask(client, "bad", [1, 2], max_tokens=5.5))
        first, bad, last = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        assert isinstance(bad, CorruptData)
        assert "Expected `int`, got `float` - at `$.request.sampling.max_tokens`" in str(bad)
        assert [one.num_tokens for one in (first, last) if isinstance(one, Completion)] == [5, 5]
        assert client.failure is None


async def test_a_request_that_cannot_be_sent_costs_no_other_of_its_turn(model) -> None:
    async with served(model) as client:
        asked = [ask(client, f"good {number}", [1, 2], max_tokens=5) for number in range(2)]
        asked.insert(1, ask(client, "bad", [1, 2], max_tokens=np.int64(5)))
        first, bad, last = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        assert isinstance(bad, TypeError)
        assert [one.num_tokens for one in (first, last) if isinstance(one, Completion)] == [5, 5]


class MeasuresWithNumpy(SimulatedEngine):
    def step(self) -> list[SampledTokens]:
        reported = super().step()
        for one in reported:
            if one.request_id == "bad":
                one.metrics["measured"] = np.float32(1)  # type: ignore[assignment]
        return reported


async def test_a_reply_that_cannot_be_sent_is_an_error_of_its_call_alone() -> None:
    async with served(None, new_engine=lambda: MeasuresWithNumpy(step_s=0.0)) as client:
        asked = [ask(client, name, [1, 2], max_tokens=5) for name in ("good", "bad")]
        good, bad = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        assert isinstance(good, Completion)
        assert isinstance(bad, EngineFailed)
        assert "a message cannot hold a float32" in str(bad)
        assert client.failure is None


async def test_cancelling_the_caller_aborts_the_remote_request(model) -> None:
    async with served(model, brake=Brake()) as client:
        calls = [ask(client, str(i), [1], max_tokens=250) for i in range(4)]
        await running(client, 4)
        for call in calls:
            call.cancel()
        assert (await ask(client, "next", [2], max_tokens=3)).num_tokens == 3
        await running(client, 0)
        assert (await client.hello()).statistics.sampled_tokens_total < 4 * 250


async def test_a_client_told_of_a_failure_fails_every_outstanding_and_later_call(model) -> None:
    async with served(model) as client:
        call = ask(client, "r", [1], max_tokens=250)
        await asyncio.sleep(0)
        client.fail(EngineFailed("the supervisor saw it go"))
        with pytest.raises(EngineFailed, match="the supervisor saw it go"):
            await call
        with pytest.raises(EngineFailed, match="the supervisor saw it go"):
            await ask(client, "later", [1])


SILENT_SERVER = """
import sys, zmq
socket = zmq.Context.instance().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
socket.recv_multipart()
print("got it", flush=True)
while True:
    socket.recv_multipart()
"""


async def test_the_death_of_the_servers_process_fails_outstanding_calls_at_once(tmp_path: Path) -> None:
    folder = create_socket_folder()
    address = ipc_address(folder, "generator")
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(SILENT_SERVER), address], stdout=subprocess.PIPE
    )
    client = GeneratorClient(address, name="generator 0")
    try:
        call = ask(client, "r", [1])
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        process.kill()
        with pytest.raises(EngineFailed, match="generator 0 ended"):
            await asyncio.wait_for(call, 20)
        with pytest.raises(EngineFailed, match="generator 0 ended"):
            await ask(client, "later", [1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        await client.close()
        (folder / "generator").unlink(missing_ok=True)
        folder.rmdir()


async def test_long_replies_that_come_at_once_are_handed_out_over_many_turns_of_the_loop() -> None:
    folder = create_socket_folder()
    address, turn, resumed_in = ipc_address(folder, "g"), 0, list[int]()
    router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    client = GeneratorClient(address)

    async def asked(name: str) -> None:
        await ask(client, name, [1])
        resumed_in.append(turn)

    waiting = [asyncio.create_task(asked(str(number))) for number in range(8)]
    identity, calls = await router.recv_multipart()
    tokens = np.zeros(4096, np.int32)
    reply = Completion(tokens, tokens.astype(np.float32), tokens, FinishReason.STOP)
    call_ids = [call.call_id for call in messages.unpack_calls(calls)]
    replies = [messages.CompletionReply(call_id=call_id, completion=reply) for call_id in call_ids]
    await router.send_multipart([identity, encode(replies)])
    while not all(task.done() for task in waiting):
        turn += 1
        await asyncio.sleep(0)
    assert len(set(resumed_in)) == len(waiting) == len(resumed_in)
    router.close(linger=0)
    await client.leave()
    (folder / "g").unlink(missing_ok=True)
    folder.rmdir()


async def test_an_idle_engine_that_ends_by_itself_is_told_to_every_client_at_once() -> None:
    folder = create_socket_folder()
    engine = EndsByItself()
    server = GeneratorServer(Generator(lambda: engine), MemoryModelStateDictStore().open, ipc_address(folder, "g"))
    serving = asyncio.create_task(server.serve())
    clients = [GeneratorClient(server.address) for _ in range(2)]
    for client in clients:
        await client.hello()
    threading.Thread(target=engine.end).start()
    async with asyncio.timeout(30):  # nothing is asked of it: only the end itself can tell
        for client in clients:
            assert "a rank of it died" in str(await client.failed())
        with pytest.raises(EngineFailed, match="a rank of it died"):
            await serving
    for client in clients:
        with pytest.raises(EngineFailed, match="a rank of it died"):
            await ask(client, "late", [1])
        await client.leave()
    (folder / "g").unlink(missing_ok=True)
    folder.rmdir()


class EndsByItself(SimulatedEngine):
    """As one does whose processes are others than the one that steps it."""

    def watch(self, on_failure: FailureListener) -> None:
        self.end = partial(on_failure, EngineFailed("a rank of it died"))


async def test_a_server_that_is_alive_and_stuck_fails_outstanding_calls_by_the_deadline_for_progress() -> None:
    folder = create_socket_folder()
    address = ipc_address(folder, "generator")
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(SILENT_SERVER), address], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    first = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    first.connect(address)
    client = GeneratorClient(address, name="generator 0", progress_deadline_s=0.2)
    try:
        await first.send(b"are you there?")
        assert await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60) == b"got it\n"
        with pytest.raises(EngineFailed, match=r"generator 0 is stuck: no progress for 0\.2 s"):
            await asyncio.wait_for(ask(client, "r", [1]), 20)
        with pytest.raises(EngineFailed, match="generator 0 is stuck"):
            await ask(client, "later", [1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        first.close(linger=0)
        await client.leave()
        (folder / "generator").unlink(missing_ok=True)
        folder.rmdir()


async def test_tokens_and_load_are_told_while_a_request_goes_on(model) -> None:
    reports: list[int] = []
    async with served(model) as client:
        heard: list[Completion] = []
        listening = GeneratorClient(client.address, on_report=lambda statistics, received: reports.append(received))
        await listening.hello()
        done = await listening.generate(
            request("r", [1, 2], session="s", group="g", max_tokens=200),
            on_chunk=heard.append,
        )
        assert_told(heard, done)
        assert len(heard) > 3
        while reports[-1:] != [1]:  # noqa: ASYNC110 - reports come every so often
            await asyncio.sleep(0.01)
        await listening.leave()
