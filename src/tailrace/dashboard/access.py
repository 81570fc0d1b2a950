"""Who may look: everybody on this machine, or who has the link. And what a page may do: nothing but show."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


@dataclass(frozen=True, slots=True)
class Access:
    """What a request must have."""

    token: str | None
    """None: whoever reaches the address may look, which is this machine's alone."""

    @classmethod
    def to_address(cls, host: str) -> Access:
        """A loopback address needs no token; any other gets a new one."""
        return cls(None if is_loopback(host) else secrets.token_urlsafe(24))

    def allows_host(self, host: str) -> bool:
        """Without a token, only names of this machine: another's page may have its own name point here.

        >>> Access(None).allows_host("localhost:8420"), Access(None).allows_host("evil.example:8420")
        (True, False)
        """
        return self.token is not None or is_loopback(_without_port(host))

    def allows(self, token: str) -> bool:
        """Whether this is the one."""
        return self.token is None or secrets.compare_digest(token.encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """
    >>> [_without_port(host) for host in ("localhost:80", "[::1]:80", "127.0.0.1")]
    ['localhost', '::1', '127.0.0.1']
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class Guarded:
    """An application behind its access, with headers that let its pages run only what it ships."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        if not self._access.allows_host(headers.get(b"host", "")):
            await _refuse(send, 421, "ask for this page by the address that `tailrace ui` printed")
        elif given and self._access.token is not None and self._access.allows(given):
            await _enter(send, scope["path"], f"{_cookie_name(scope)}={given}")
        elif not self._access.allows(_cookie(headers, _cookie_name(scope))):
            await _refuse(send, 401, "open the link that `tailrace ui` printed: its token lets you in")
        elif scope["method"] not in ("GET", "HEAD") and not _is_from_here(headers):
            await _refuse(send, 403, "only this page itself may ask for that")
        else:
            await self._app(scope, receive, _with_headers(send))


def _cookie_name(scope: Scope) -> str:
    """Of the port: a browser sends a host's cookies to all of its ports, and several may have dashboards."""
    return f"tailrace_ui_{scope['server'][1]}"


def _cookie(headers: Mapping[bytes, str], name: str) -> str:
    try:
        found = SimpleCookie(headers.get(b"cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _is_from_here(headers: Mapping[bytes, str]) -> bool:
    """A page of another place cannot set these: browsers do."""
    origin = headers.get(b"origin", "").partition("://")[2]
    return origin == headers.get(b"host", "") and headers.get(b"content-type", "").startswith("application/json")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return sending


async def _enter(send: Send, path: str, cookie: str) -> None:
    """Keep the token in a cookie, and out of the address."""
    # One slash: two would name another host.
    place = ("/" + path.lstrip("/")).encode("latin-1", "replace")
    headers = [
        (b"location", place),
        (b"set-cookie", f"{cookie}; Path=/; HttpOnly; SameSite=Strict".encode()),
        *_HEADERS,
    ]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Send, status: int, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode() + b"\n"})
