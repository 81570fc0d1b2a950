"""A Redis server of a run's own: on loopback, with a password, in memory, gone with the process that started it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tailrace.child_processes import describe_exit
from tailrace.errors import SettingsError, TransportError
from tailrace.free_ports import free_port
from tailrace.transport.redis.connection import require_redis

PROGRAM = "redis-server"
_STARTS_S = 10.0
_LOOK_S = 0.02


class RedisServer:
    """One `redis-server`, on a free port. What it prints goes where this process's output goes."""

    def __init__(self, folder: Path, *, keeps_data: bool = False) -> None:
        """It writes into `folder`, and only with `keeps_data`, each command at once.

        Raises `SettingsError` where none is installed.
        """
        if shutil.which(PROGRAM) is None:
            raise SettingsError(
                f"transport.redis.start = true needs {PROGRAM}, which is not installed: apt-get install {PROGRAM}, or "
                "give transport.redis.url",
                key=("transport", "redis", "start"),
            )
        self._folder, self._keeps_data = folder, keeps_data
        self._password, self._port = secrets.token_urlsafe(24), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """With its password."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Wait until it answers. Raises `TransportError` where it does not."""
        self._process = subprocess.Popen([PROGRAM, "-"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        with self._process.stdin as configuration:  # not on the command line, which every user of the machine reads
            configuration.write(self._configuration.encode())
        deadline_s = time.monotonic() + _STARTS_S
        while not self._answers():
            if self._process.poll() is not None:
                raise TransportError(f"{PROGRAM} ended at once, {describe_exit(self._process.returncode)}")
            if time.monotonic() > deadline_s:
                raise TransportError(f"{PROGRAM} did not answer within {_STARTS_S:g} s")
            time.sleep(_LOOK_S)
        require_redis(self.url)

    def wait(self) -> int:
        """For its end; its exit status."""
        assert self._process is not None
        return self._process.wait()

    def kill(self) -> None:
        """At once. What it had in memory is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
            return True
        return False

    @property
    def _configuration(self) -> str:
        return "\n".join(
            (
                "bind 127.0.0.1",
                f"port {self._port}",
                f"requirepass {self._password}",
                f"dir {self._folder}",
                'save ""',
                f"appendonly {'yes' if self._keeps_data else 'no'}",
                "appendfsync always",
                "maxmemory 0",
                "maxmemory-policy noeviction",
                "loglevel warning",
                "",
            )
        )
