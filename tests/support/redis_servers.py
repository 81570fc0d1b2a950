"""Real Redis servers for tests, and what can happen to one."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import RedisConnection, Reply
from tailrace.transport.redis.server import PROGRAM, RedisServer
from tailrace.transport.redis.streams import Origin

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: make test-system")
needs_redis = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"needs {PROGRAM}: make test-system")


class ReplicatedServer(RedisServer):
    """One that a replica can follow, behind a link that lags on demand, and that the replica can take over from."""

    _replica: RedisServer | None = None
    _link: Link

    def replicate(self) -> None:
        """Have a replica that has all."""
        self._replica = replica = RedisServer(self._folder)
        replica.start()
        self._link = Link(self._port)
        ask(self, "CONFIG", "SET", "repl-diskless-sync-delay", "0")  # it waits 5 s for further replicas
        ask(replica, "CONFIG", "SET", "masterauth", self._password)
        ask(replica, "REPLICAOF", "127.0.0.1", str(self._link.port))
        while b"master_link_status:up" not in told(replica, "INFO", "replication"):
            time.sleep(0.02)

    def lag(self) -> None:
        """The replica gets nothing from now on, and the primary does not know."""
        self._link.lags.set()

    def fail_over(self) -> None:
        """The primary is killed, and the replica is promoted, and found where the primary was."""
        assert self._replica is not None
        super().kill()
        self._link.close()
        with contextlib.closing(RedisConnection(self._replica.url)) as connection:
            connection.one("REPLICAOF", "NO", "ONE")
            connection.one("CONFIG", "SET", "requirepass", self._password, "port", self._port)
        self._process, self._replica = self._replica._process, None

    @override
    def kill(self) -> None:
        super().kill()
        if self._replica is not None:
            self._replica.kill()
            self._link.close()


class Link:
    """Between a primary and its replica. What lags is never delivered."""

    def __init__(self, primary: int) -> None:
        self.lags = threading.Event()
        self._primary = primary
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                replica, _ = self._listener.accept()
                primary = socket.create_connection(("127.0.0.1", self._primary))
                self._sockets += [replica, primary]
                for source, target in ((replica, primary), (primary, replica)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if not self.lags.is_set():
                    target.sendall(content)


class TlsServer(RedisServer):
    """One that speaks TLS alone, with a certificate of an authority that the test made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.authority = make_certificates(folder)

    @property
    @override
    def url(self) -> str:
        return f"rediss://:{self._password}@{self.address(self.authority)}"

    def address(self, authority: Path) -> str:
        """What follows the user and password in its URL, for whoever trusts this authority."""
        return f"127.0.0.1:{self._port}/0?ssl_ca_certs={authority}"

    @property
    @override
    def _configuration(self) -> str:
        files = {"cert": "server.crt", "key": "server.key", "ca-cert": "authority.crt"}
        lines = [f"tls-{name}-file {self._folder / file}" for name, file in files.items()]
        plain = super()._configuration.replace(f"port {self._port}", f"port 0\ntls-port {self._port}")
        return "\n".join([*lines, "tls-auth-clients no", plain])


def make_certificates(folder: Path) -> Path:
    """An authority, and a server of this machine's that it vouches for; the authority's certificate."""
    folder.mkdir(exist_ok=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-CA", "authority.crt", "-CAkey", "authority.key")
    signs = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # from Python 3.13 on an authority has to say so
    for command in (
        ("req", "-x509", *curve, "-keyout", "authority.key", "-out", "authority.crt", "-subj", "/CN=authority", *signs),
        ("req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=redis"),
        ("x509", "-req", "-in", "server.csr", *authority, "-CAcreateserial", "-out", "server.crt", "-extfile", "names"),
    ):
        (folder / "names").write_text("subjectAltName = IP:127.0.0.1\n")
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
    return folder / "authority.crt"


@contextlib.contextmanager
def redis_server(folder: Path, *, keeps_data: bool = False) -> Iterator[ReplicatedServer]:
    """One that is gone afterwards."""
    folder.mkdir(exist_ok=True)
    server = ReplicatedServer(folder, keeps_data=keeps_data)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def place_of(
    server: RedisServer, *, epoch: str = "this-epoch", run: str = "", outage_s: float = 60.0, url: str = ""
) -> RedisPlace:
    """Streams of a run that no other test has."""
    return RedisPlace(url or server.url, Origin(run or uuid.uuid4().hex, epoch), outage_s)


def ask(server: RedisServer, *command: str) -> Reply:
    """An operator's command."""
    with contextlib.closing(RedisConnection(server.url)) as connection:
        return connection.one(*command)


def told(server: RedisServer, *command: str) -> bytes:
    """What it answers, which is text."""
    reply = ask(server, *command)
    assert isinstance(reply, bytes)
    return reply
