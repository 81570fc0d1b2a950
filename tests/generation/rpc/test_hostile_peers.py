"""A peer that sends garbage costs its own connection, and nobody else's: real sockets, whatever comes through them."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from tailrace.errors import CorruptData, EngineFailed
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc import messages
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.generation.rpc.uploads import Upload
from tailrace.records import FinishReason, StepTrained
from tailrace.transport.channels import create_socket_folder, encode, ipc_address
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.events.rpc import EventLogClient, EventLogServer, FollowLog
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.generation.engine_support import make_engine, request

GARBAGE: list[list[bytes]] = [
    [b""],
    [b"\xff"],
    [b"", b"", b""],
    [b"\x91" * 5000],
    [b"\xd9\x01\xff"],
    [b"\xdd\xff\xff\xff\xff"],
    [b"\x81\xa4type\xacGenerateCall"],
    [encode(messages.UploadCall(call_id=1, version=1, upload=Upload(8, "digest"), offset=0))],
    [encode(messages.AbortCall(call_id=10**9)), b"frame"],
    *([bytes([byte]) * 40] for byte in range(0, 256, 5)),
]
"""Multipart messages."""


@asynccontextmanager
async def hostile_peer(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    peer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    peer.connect(address)
    try:
        yield peer
    finally:
        peer.close(linger=0)


async def test_a_generator_goes_on_for_others_whatever_a_client_sends(model) -> None:
    folder = create_socket_folder()
    address = ipc_address(folder, "generator")
    server = GeneratorServer(Generator(lambda: make_engine(model)), MemoryModelStateDictStore().open, address)
    serving = asyncio.create_task(server.serve())
    client = GeneratorClient(address)
    try:
        await client.hello()
        async with hostile_peer(address) as peer:
            draw, good = random.Random(0), encode(messages.GenerateCall(call_id=1, request=request("hostile", [1, 2])))
            for frames in [*GARBAGE, *([_mutated(good, draw)] for _ in range(200))]:
                await peer.send_multipart(frames)
            await peer.send(encode(messages.HelloCall(call_id=77, protocol=messages.PROTOCOL)))
            async with asyncio.timeout(60):
                while not _welcomes(await peer.recv()):  # all that it sent before was taken
                    pass
        completion = await client.generate(request("ours", [1, 2, 3], temperature=0, max_tokens=5))
        assert (completion.num_tokens, completion.finish_reason) == (5, FinishReason.LENGTH)
    finally:
        await client.close()
        await asyncio.wait_for(serving, 60)
        (folder / "generator").unlink(missing_ok=True)
        folder.rmdir()


def _mutated(message: bytes, draw: random.Random) -> bytes:
    content = bytearray(message)
    for _ in range(draw.randrange(1, 4)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def _welcomes(message: bytes) -> bool:
    return any(isinstance(one, messages.WelcomeReply) and one.call_id == 77 for one in messages.unpack_replies(message))


async def test_a_generator_goes_on_after_bytes_that_are_not_even_of_its_transport(model, tmp_path: Path) -> None:
    server = GeneratorServer(
        Generator(lambda: make_engine(model)), MemoryModelStateDictStore().open, "tcp://127.0.0.1:0"
    )
    serving = asyncio.create_task(server.serve())
    host, port = server.address.removeprefix("tcp://").split(":")
    for content in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 9000,
        bytes(9000),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
    ):
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(content)
    client = GeneratorClient(server.address)
    try:
        await client.hello()
        assert (await client.generate(request("ours", [1, 2], max_tokens=3))).num_tokens == 3
    finally:
        await client.close()
        await asyncio.wait_for(serving, 60)


async def test_a_server_that_answers_with_garbage_fails_its_own_client_alone(model) -> None:
    folder = create_socket_folder()
    for number, frames in enumerate(GARBAGE[1:7]):
        address = ipc_address(folder, f"hostile-{number}")
        hostile = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        hostile.bind(address)
        client = GeneratorClient(address)
        try:
            asking = asyncio.create_task(client.generate(request("ours", [1, 2], max_tokens=3)))
            peer, *_ = await hostile.recv_multipart()
            await hostile.send_multipart([peer, *frames])
            error = (await asyncio.gather(asking, return_exceptions=True))[0]
            assert isinstance(error, EngineFailed | CorruptData), error
            assert isinstance(client.failure, CorruptData)
        finally:
            await client.leave()
            hostile.close(linger=0)
            (folder / f"hostile-{number}").unlink(missing_ok=True)
    folder.rmdir()


async def test_an_event_log_goes_on_for_others_whatever_a_client_sends() -> None:
    folder = create_socket_folder()
    address = ipc_address(folder, "events")
    log = MemoryEventLog("e")
    server = EventLogServer(log, address)
    client = EventLogClient(address, "e")
    try:
        async with hostile_peer(address) as peer:
            for frames in GARBAGE:
                await peer.send_multipart(frames)
            await peer.send(encode(FollowLog()))
            event = StepTrained(epoch="e", step=1, version=1, metrics={})
            async with asyncio.timeout(60):
                await client.append(event)
                assert msgspec.msgpack.decode(await peer.recv())["event"]["step"] == 1
                assert [await anext(aiter(client.follow()))] == [event]
    finally:
        await client.close()
        await log.close()
        await server.close()
        (folder / "events").unlink(missing_ok=True)
        folder.rmdir()


def test_the_samples_of_garbage_are_what_they_are_meant_to_be() -> None:
    assert np.unique([len(frames) for frames in GARBAGE]).tolist() == [1, 2, 3]
