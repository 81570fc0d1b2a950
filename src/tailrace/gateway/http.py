"""Requests in and responses out, over ASGI: no framework's objects, since every turn passes here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import xxhash
from starlette.types import Receive, Scope, Send

from tailrace.gateway.dialects.protocol import Failure, RequestInvalid
from tailrace.gateway.turns import Repeatable
from tailrace.guards import guarded
from tailrace.records import Json
from tailrace.records.conversation import DEEPEST, is_too_deep
from tailrace.timeouts import timeout

Headers: TypeAlias = dict[bytes, bytes]
_DRAINED = 4
"""How many times the largest body a client may send and still be told that it was too large."""

_COUNT_DIGITS = 9
"""Of a client's own count of its attempts; what is longer is none."""


def headers_of(scope: Scope) -> Headers:
    """By their names in lower case; of those that come twice, the first."""
    return dict(reversed(scope["headers"]))


def keys_of(headers: Headers) -> list[str]:
    """Keys in the headers, in the order in which they are looked at."""
    found = []
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer" and token.strip():
        found.append(token.strip().decode("latin-1"))
    if key := headers.get(b"x-api-key", b"").strip():
        found.append(key.decode("latin-1"))
    return found


def host_of(headers: Headers) -> str | None:
    """What the client calls this machine, as it stands in addresses; None where it does not say.

    >>> host_of({b"host": b"[::1]:8000"}), host_of({b"host": b"there"}), host_of({})
    ('[::1]', 'there', None)
    """
    try:
        host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
    except ValueError:
        return None
    return f"[{host}]" if host and ":" in host else host


async def read_json(
    scope: Scope, receive: Receive, headers: Headers, *, max_bytes: int, timeout_s: float
) -> tuple[dict[str, Json], bytes]:
    """A request's body, decoded, and a digest of it and its path.

    Raises `RequestInvalid`: 400, 408, 413, 415; `ConnectionResetError` where the client is gone.
    """
    kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    encoding = headers.get(b"content-encoding", b"identity")
    if kind != b"application/json" or encoding != b"identity":
        raise RequestInvalid(
            f"the body is {kind.decode('latin-1')!r}, encoded as {encoding.decode('latin-1')!r}: send JSON, as it is, "
            "with `Content-Type: application/json`",
            status=415,
        )
    try:
        async with timeout(timeout_s):
            raw = await _read(receive, max_bytes)
    except TimeoutError:
        raise RequestInvalid(f"the body did not arrive within {timeout_s:g} s", status=408) from None
    with guarded("the body is no JSON", RequestInvalid):
        body = msgspec.json.decode(raw)
    if not isinstance(body, dict):
        raise RequestInvalid("the body must be a JSON object")
    if is_too_deep(body):
        raise RequestInvalid(f"the body has more than {DEEPEST} lists and objects inside each other")
    digest = xxhash.xxh3_128(scope["path"].encode())
    digest.update(raw)
    return body, digest.digest()


def repeatable(headers: Headers, digest: bytes) -> Repeatable:
    """How a client would ask for the same again."""
    key, attempt = headers.get(b"idempotency-key"), headers.get(b"x-stainless-retry-count", b"")
    is_count = attempt.isdigit() and len(attempt) <= _COUNT_DIGITS
    return Repeatable(digest, None if key is None else key.decode("latin-1"), int(attempt) if is_count else None)


async def send_json(send: Send, body: Json, *, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """A whole response."""
    await send_bytes(send, msgspec.json.encode(body), b"application/json", status=status, headers=headers)


async def send_bytes(
    send: Send,
    body: bytes,
    content_type: bytes,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """A whole response."""
    start: MutableMapping[str, Any] = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def send_nothing(send: Send) -> None:
    """204: all is well, and there is nothing to say."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def send_failure(send: Send, failure: Failure, body: Json) -> None:
    """A whole response that says why there is no answer."""
    headers = [(b"x-should-retry", b"true" if failure.status >= 500 else b"false")]
    if failure.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if failure.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send_json(send, body, status=failure.status, headers=headers)


async def begin_events(send: Send) -> None:
    """The head of a response of server-sent events."""
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_events(send: Send, events: bytes, *, more: bool = True) -> None:
    """A part of its body."""
    await send({"type": "http.response.body", "body": events, "more_body": more})


@contextmanager
def watching(receive: Receive, on_gone: Callable[[], None]) -> Iterator[None]:
    """Calls `on_gone` where the client closes its connection inside. Its body has been read."""
    watch = asyncio.get_running_loop().create_task(_until_gone(receive, on_gone))
    try:
        yield
    finally:
        watch.cancel()


async def _until_gone(receive: Receive, on_gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


async def _read(receive: Receive, max_bytes: int) -> bytes | bytearray:
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body") and len(message["body"]) <= max_bytes:
        return bytes(message["body"])
    body, size = bytearray(), 0
    while message["type"] == "http.request":
        size += len(message["body"])
        if size <= max_bytes:
            body += message["body"]
        if not message.get("more_body") or size > _DRAINED * max_bytes:
            break
        message = await receive()
    else:
        raise ConnectionResetError
    if size > max_bytes:
        raise RequestInvalid(f"the body has more than {max_bytes:,} bytes (gateway.max_body_mb); send less", status=413)
    return body
