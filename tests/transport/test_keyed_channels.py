"""Conversations over TCP whose two ends hold keys, and what others that come to the port can do to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from tailrace.errors import PeerGone
from tailrace.free_ports import free_port
from tailrace.transport.channels import Channel, wait_until
from tailrace.transport.keys import CurveKeys, guard_all

LIMIT_S = 30.0
SILENCE_MS = 3000
"""So that signs of life come every second."""


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class End:
    """One end, and what it was told."""

    def __init__(self, address: str, *, bind: bool, keys: CurveKeys | None) -> None:
        self.got: list[bytes] = []
        self.changed = asyncio.Event()
        self.channel = Channel(
            address, bind=bind, on_message=self.got.append, changed=self.changed, peer="other end", keys=keys
        )

    async def until(self, *messages: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            await wait_until(self.changed, lambda: self.got == [*messages])


@contextlib.asynccontextmanager
async def both(address: str) -> AsyncIterator[tuple[End, End]]:
    keys = CurveKeys.make()
    end_guard = guard_all(zmq.asyncio.Context.instance(), keys)
    server, client = End(address, bind=True, keys=keys), End(address, bind=False, keys=keys)
    try:
        async with asyncio.timeout(LIMIT_S):
            await wait_until(server.changed, lambda: server.channel.connected)
        yield server, client
    finally:
        await client.channel.close()
        await server.channel.close()
        end_guard()


async def exchange(server: End, client: End) -> None:
    server.got.clear()
    client.got.clear()
    server.channel.send(b"from the server")
    client.channel.send(b"from the client")
    await client.until(b"from the server")
    await server.until(b"from the client")


async def test_ends_with_the_same_keys_talk_after_signs_of_life_as_before(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.transport.channels.SILENCE_MS", SILENCE_MS)
    async with both(address) as (server, client):
        await exchange(server, client)
        await asyncio.sleep(SILENCE_MS / 2000)  # one came, which wakes a socket that has no message
        await exchange(server, client)


@pytest.mark.parametrize("keys", [None, CurveKeys.make()])
async def test_a_stranger_neither_gets_in_nor_ends_the_conversation(address: str, keys: CurveKeys | None) -> None:
    async with both(address) as (server, client):
        stranger = End(address, bind=False, keys=keys)
        with contextlib.suppress(PeerGone):
            stranger.channel.send(b"let me in")
        async with asyncio.timeout(LIMIT_S):
            await wait_until(stranger.changed, lambda: stranger.channel.failure is not None)
        assert not stranger.channel.connected
        await stranger.channel.close()
        await exchange(server, client)


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f"])
async def test_who_speaks_another_protocol_does_not_end_the_conversation(address: str, words: bytes) -> None:
    async with both(address) as (server, client):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):  # which may end it first
            writer.write(words)
            await reader.read(1)
            writer.close()
            await writer.wait_closed()
        await exchange(server, client)
        await client.channel.close()
        async with asyncio.timeout(LIMIT_S):
            await wait_until(server.changed, lambda: isinstance(server.channel.failure, PeerGone))
