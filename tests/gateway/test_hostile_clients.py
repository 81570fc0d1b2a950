"""Clients that break the rules: each costs itself, and nothing hangs, grows or crosses rollouts."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tailrace.rollouts import ChatRenderer
from tests.support.scripted_generate import Sampled
from tests.support.served_policies import Served, served, user

CHAT = "/v1/chat/completions"
ASKS = {"model": "m", "messages": [user("who?")]}


async def connected(talk: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(talk.endpoint.root_url)
    return await asyncio.open_connection(address.hostname, address.port)


def head(talk: Served, *lines: str) -> bytes:
    key = f"Authorization: Bearer {talk.endpoint.key}"
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: x", key, *lines, "", ""]).encode()


async def assert_serves(talk: Served) -> None:
    """Whoever keeps the rules is served as if nothing was."""
    async with httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=talk.headers) as client:
        assert (await client.post(CHAT, json=ASKS)).status_code == 200


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "application/json", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800 "}]}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", "application/json", 400),
        (b"[1, 2]", "application/json", 400),
        (b"", "application/json", 400),
        (b'{"a": NaN}', "application/json", 400),
        (b'{"max_tokens": 1e999}', "application/json", 400),
        (json.dumps({**ASKS, "max_tokens": 10**30}).encode(), "application/json", 200),
        (json.dumps({**ASKS, "seed": -(10**30)}).encode(), "application/json", 200),
        (json.dumps({**ASKS, "max_tokens": -1}).encode(), "application/json", 400),
        pytest.param(json.dumps({**ASKS, "temperature": 10**400}).encode(), "application/json", 400, id="temperature"),
        pytest.param(json.dumps({**ASKS, "top_p": 10**400}).encode(), "application/json", 400, id="top_p"),
        (json.dumps(ASKS).encode(), "application/x-www-form-urlencoded", 415),
        (json.dumps(ASKS).encode(), "text/plain; charset=utf-16", 415),
        (b" " * 10_000_000, "application/json", 413),
    ],
)
async def test_a_body_that_is_no_request_is_refused(
    renderer: ChatRenderer, body: bytes, kind: str, status: int
) -> None:
    async with served(renderer) as talk:
        async with httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=talk.headers) as client:
            answer = await client.post(CHAT, content=body, headers={"content-type": kind})
        assert answer.status_code == status, answer.text
        if status != 200:
            assert answer.json()["error"]["message"]
        await assert_serves(talk)


async def test_a_count_of_thousands_of_digits_counts_no_retries(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk:
        headers = {**talk.headers, "x-stainless-retry-count": "9" * 5000}
        async with httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=headers) as client:
            answers = [await client.post(CHAT, json=ASKS) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert talk.rollout.turns == 2


async def test_a_body_of_a_million_chunks_is_put_together(renderer: ChatRenderer) -> None:
    body = json.dumps(ASKS).encode()
    chunks = [b"1\r\n%c\r\n" % byte for byte in body] + [b"1\r\n \r\n"] * (1_000_000 - len(body))
    async with served(renderer) as talk:
        reader, writer = await connected(talk)
        writer.write(head(talk, "Content-Type: application/json", "Transfer-Encoding: chunked", "Connection: close"))
        writer.write(b"".join(chunks) + b"0\r\n\r\n")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 200")
        await assert_serves(talk)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, "error.message"),
        ("/v1/responses", "error.message"),
        ("/v1/messages", "type error.type error.message"),
        ("/v1/messages/count_tokens", "type error.type error.message"),
        ("/inference/v1/generate", "error.message error.code"),
    ],
)
async def test_each_route_says_what_is_wrong_in_its_own_form(renderer: ChatRenderer, path: str, error: str) -> None:
    json_type = {"content-type": "application/json"}
    async with served(renderer) as talk:
        async with talk.policy.endpoint() as ended:
            pass
        async with (
            talk.policy.endpoint() as other,
            httpx.AsyncClient(timeout=30, base_url=talk.endpoint.root_url, headers=talk.headers) as client,
        ):
            answers = [
                await client.post(path, content=b'{"model": "\xff"}', headers=json_type),
                await client.post(path, content=b"[" * 100_000, headers=json_type),
                await client.post(path, content=b"{}", headers={"content-type": "text/plain"}),
                await client.post(path, content=b" " * 10_000_000, headers=json_type),
                await client.post(path, json={}, headers={"authorization": "Bearer nobody's"}),
                await client.post(path, json={}, headers={"authorization": f"Bearer {ended.key}"}),
                await client.post(f"/rollouts/{other.key}{path}", json={}),
            ]
    assert [answer.status_code for answer in answers] == [400, 400, 415, 413, 401, 410, 401]
    for answer in answers:
        for field in error.split():
            said = answer.json()
            for name in field.split("."):
                said = said[name]
            assert said, answer.text
    assert talk.rollout.turns == 0


async def test_whoever_opens_a_connection_and_says_nothing_or_half_is_cut_off(renderer: ChatRenderer) -> None:
    async with served(renderer, settings={"client_timeout_s": 2}) as talk:
        silent, _ = await connected(talk)
        half, writing = await connected(talk)
        writing.write(b"POST /v1/chat/comp")
        bodiless, wanting = await connected(talk)
        wanting.write(head(talk, "Content-Type: application/json", "Content-Length: 100") + b"{")
        assert await until_closed(silent) == b""
        assert await until_closed(half) == b""
        assert b" 408 " in (await until_closed(bodiless)).partition(b"\r\n")[0]
        await assert_serves(talk)


async def test_what_is_no_http_is_refused(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk:
        reader, writer = await connected(talk)
        writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 400")
        await assert_serves(talk)


@pytest.mark.parametrize("pause_at", [None, "head", "body"])
@pytest.mark.parametrize("wish", ["h2c", "websocket"])
async def test_a_client_that_asks_for_another_protocol_is_answered_in_this_one(
    renderer: ChatRenderer, wish: str, pause_at: str | None
) -> None:
    """Java's own client and `curl --http2` ask for HTTP/2 with each request."""
    body = json.dumps(ASKS).encode()
    lines = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {wish}", "HTTP2-Settings: AAEAAEAAAAIAAAAA"]
    async with served(renderer) as talk:
        reader, writer = await connected(talk)
        wishing = head(talk, "Content-Type: application/json", f"Content-Length: {len(body)}", *lines)
        last = head(talk, "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
        place = {None: 0, "head": len(wishing) - 30, "body": len(wishing) + 5}[pause_at]
        for part in (wishing + body)[:place], (wishing + body)[place:] + last + body:
            writer.write(part)
            await asyncio.sleep(0.05)  # so that it is read apart
        answers = (await until_closed(reader)).split(b"HTTP/1.1 ")[1:]
    assert [answer.partition(b" ")[0] for answer in answers] == [b"200", b"200"]
    assert talk.rollout.turns == 2


@pytest.mark.parametrize(
    ("version", "connection"),
    [("1.1", "close, Upgrade"), ("1.1", "Upgrade\r\nConnection: close"), ("1.0", "Upgrade")],
)
async def test_one_that_wants_the_connection_to_end_as_well_is_answered_and_then_it_ends(
    renderer: ChatRenderer, version: str, connection: str
) -> None:
    body = json.dumps(ASKS).encode()
    lines = ["Content-Type: application/json", f"Content-Length: {len(body)}", f"Connection: {connection}"]
    async with served(renderer) as talk:
        reader, writer = await connected(talk)
        asked = head(talk, *lines, "Upgrade: h2c").replace(b"HTTP/1.1", f"HTTP/{version}".encode())
        writer.write(asked + body + asked + body)
        answers = (await until_closed(reader)).split(b"HTTP/1.1 ")[1:]
    assert [answer.partition(b" ")[0] for answer in answers] == [b"200"]
    assert talk.rollout.turns == 1


async def test_without_budget_each_of_those_that_ask_at_once_gets_the_empty_reply(renderer: ChatRenderer) -> None:
    body = json.dumps(ASKS).encode()
    async with served(renderer, max_turns=1) as talk:
        await assert_serves(talk)
        asked = head(talk, "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close") + body
        clients = [await connected(talk) for _ in range(3)]
        for _, writer in clients:
            writer.write(asked)
        answers = [await until_closed(reader) for reader, _ in clients]
        assert all(answer.startswith(b"HTTP/1.1 200") and b'"length"' in answer for answer in answers), answers
        reader, writer = await connected(talk)
        writer.write(asked)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 429")


async def test_whoever_asks_for_a_tunnel_is_refused(renderer: ChatRenderer) -> None:
    async with served(renderer) as talk:
        for target in ("elsewhere:80", CHAT):
            reader, writer = await connected(talk)
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\n\r\n".encode() * 3)
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 400")
        await assert_serves(talk)


async def test_a_client_that_never_reads_is_cut_off_and_its_rollout_goes_on(renderer: ChatRenderer) -> None:
    long = Sampled(renderer.tokenizer.encode("Ada and Bob " * 40_000))
    sampling: dict[str, Any] = {"client_timeout_s": 2}
    async with served(renderer, [long, "Ada"], settings=sampling, max_tokens=1_000_000) as talk:
        address = urlsplit(talk.endpoint.root_url)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((address.hostname, address.port))
            body = json.dumps({**ASKS, "stream": True}).encode()
            deaf.sendall(head(talk, "Content-Type: application/json", f"Content-Length: {len(body)}") + body)
            async with asyncio.timeout(60):
                while not talk.gateway.tally.requests:  # noqa: ASYNC110 - a count has no event
                    await asyncio.sleep(0.05)
        await assert_serves(talk)


async def test_many_clients_that_come_and_go_leave_nothing_behind(renderer: ChatRenderer) -> None:
    async with served(renderer, stepwise=True, max_turns=100) as talk:
        for _ in range(20):
            _, writer = await connected(talk)
            body = json.dumps(ASKS).encode()
            writer.write(head(talk, "Content-Type: application/json", f"Content-Length: {len(body)}") + body)
            begun = talk.generate.begun + 1
            await talk.generate.until(begun=begun)
            writer.transport.abort()
        await talk.generate.until(cancelled=20)
        async with asyncio.timeout(30):
            while talk.gateway.tally.running_turns:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.01)
        talk.generate.allow(64)
        await assert_serves(talk)
    assert talk.rollout.turns == 21
    talk.assert_recorded_as_sampled()
