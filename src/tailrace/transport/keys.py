"""CURVE keys that both ends hold: in one file, or told to every role of a run. Without keys an address must be of this
machine: anybody who reaches a generator can use it and change its weights.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from tailrace.errors import SettingsError
from tailrace.guards import guarded, read_at_most

_DOMAIN = "tailrace"
_ASKED_AT = "inproc://zeromq.zap.01"
"""Where libzmq asks of a context whether to let somebody in (ZMQ RFC 27)."""
_MOST_BYTES = 4096
"""Of a key file."""
_KEY_CHARS = 40

HEARTBEAT_MS = 5_000
"""Between two signs of life on a connection that could break without either end being told."""


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two key pairs: the server's and its clients'. Z85, 40 characters each."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> CurveKeys:
        """Fresh ones."""
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(key.decode() for key in pairs))

    def derived(self, purpose: str) -> bytes:
        """A secret that both ends can make, for connections that are not ZMQ's."""
        return hmac.digest(self.server_secret.encode(), purpose.encode(), "sha256")

    def apply_to_server(self, socket: zmq.Socket[Any]) -> None:
        """Before it binds. Only holders of the client's key are let in once its context is guarded (`guard_all`)."""
        socket.zap_domain = _DOMAIN.encode()
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret.encode()

    def apply_to_client(self, socket: zmq.Socket[Any]) -> None:
        """Before it connects."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_publickey = self.client_public.encode()
        socket.curve_secretkey = self.client_secret.encode()


def read_keys(path: Path, setting: str) -> CurveKeys:
    """The keys of a file. Raises `SettingsError` that names `setting`."""
    with guarded(f"{setting}: {path} is no key file of `tailrace serve --key`", SettingsError):
        try:
            keys = msgspec.json.decode(read_at_most(path, _MOST_BYTES), type=CurveKeys)
        except OSError as error:
            raise SettingsError(f"{setting}: cannot read the key file {path}: {error.strerror}") from error
        for name, key in msgspec.structs.asdict(keys).items():
            if len(key) != _KEY_CHARS or not z85.decode(key.encode()):
                raise ValueError(f"its {name} is no key of CURVE")
    return keys


def write_keys(path: Path, setting: str) -> CurveKeys:
    """Fresh keys in a new file that only this user can read. Raises `SettingsError` that names `setting`."""
    keys = CurveKeys.make()
    _write_secret(path, msgspec.json.format(msgspec.json.encode(keys)), setting)
    return keys


def read_or_write_keys(path: Path, setting: str, say: Callable[[str], None], *, copy_to: str) -> CurveKeys:
    """Those of the file; where there is none yet, fresh ones, of which people are told. Raises as both do."""
    if path.exists():
        return read_keys(path, setting)
    keys = write_keys(path, setting)
    say(f"wrote new keys to {path}: copy it to {copy_to}")
    return keys


def read_http_key(path: Path, setting: str) -> str:
    """The key of HTTP clients that a file holds. Raises `SettingsError` that names `setting`."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{setting}: cannot read the key file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        key = ""
    if not (key.isascii() and key.replace("-", "").replace("_", "").isalnum()):
        raise SettingsError(f"{setting}: {path} holds no key: letters, digits, - and _, on one line")
    return key


def write_http_key(path: Path, key: str, setting: str) -> None:
    """To a new file that only this user can read. Raises `SettingsError` that names `setting`."""
    _write_secret(path, key.encode(), setting)


def _write_secret(path: Path, secret: bytes, setting: str) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret + b"\n")
    except OSError as error:
        raise SettingsError(f"{setting}: cannot write the key file {path}: {error.strerror}") from error


def require_safe_address(address: str, *, has_keys: bool, setting: str, key_setting: str) -> None:
    """Raise `SettingsError` for what is no address, and for one that other machines reach without keys.

    >>> require_safe_address("tcp://127.0.0.1:5757", has_keys=False, setting="--address", key_setting="--key")
    >>> require_safe_address("tcp://0.0.0.0:5757", has_keys=False, setting="--address", key_setting="--key")
    Traceback (most recent call last):
        ...
    tailrace.errors.SettingsError: --address = tcp://0.0.0.0:5757 can be reached from other machines: give --key as well
    """
    try:
        parts = urlsplit(address)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme == "ipc" and address.removeprefix("ipc://"):
        return
    if scheme != "tcp" or not host or port is None:
        raise SettingsError(f"{setting} = {address} is no address: write tcp://HOST:PORT or ipc://PATH")
    if not has_keys and not _is_loopback(host):
        raise SettingsError(f"{setting} = {address} can be reached from other machines: give {key_setting} as well")


def is_of_this_machine(address: str) -> bool:
    """Whether no other machine reaches it.

    >>> [is_of_this_machine(address) for address in ("ipc:///run/join", "tcp://localhost:5800", "tcp://10.0.0.5:5800")]
    [True, True, False]
    """
    parts = urlsplit(address)
    return parts.scheme == "ipc" or _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Notice a connection that broke silently (a machine that lost its power)."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)


class _OnlyClient:
    """What the authenticator asks: is it the key of our clients?"""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public_key


def guard_all(context: zmq.asyncio.Context, keys: CurveKeys) -> Callable[[], None]:
    """Let only holders of the client's key into those of a context's sockets that have the server's key.

    On the running event loop, before they bind, once for a context. Returns what ends the guard.
    """
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, credentials_provider=_OnlyClient(keys.client_public.encode()))

    def stop() -> None:
        if authenticator.zap_socket is not None:  # closing it gives its address back only after a while
            authenticator.zap_socket.unbind(_ASKED_AT)
        authenticator.stop()

    return stop
