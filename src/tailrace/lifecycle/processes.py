"""A role's process, started with a socket as its standard input.

The parent writes a `Launch` as one line of JSON and keeps the socket open: its end of file is how the child learns, on
every system, that its parent is gone, however it died. A second line, `STOP`, asks the child to end. The child answers
with lines of JSON: that it is ready, and signs of life (`heartbeats`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from tailrace.lifecycle.roles import RoleSpec

STOP = b"stop\n"
"""Asks a role to end. A signal would not do: schedulers send SIGTERM to every process of a job."""

STACKS_S = 1.0
"""How long a role may take to write the stacks of its threads into its log."""

_LOOPBACK = Path("/sys/class/net/lo")
_THREAD_VARIABLES = (
    "VECLIB_MAXIMUM_THREADS",
    *(f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON")),
)


class Launch(msgspec.Struct, frozen=True):
    """The child's first line of input."""

    spec: RoleSpec
    life: int
    address: str
    sys_path: list[str]
    """The parent's, so that both import the same modules."""
    orphan_grace_s: float
    """From the parent's end to this process group's, at most."""
    beat_every_s: float = 0.0
    """Between two signs of life; 0: none."""


def spawn_role(
    spec: RoleSpec,
    *,
    orphan_grace_s: float,
    life: int = 0,
    address: str = "",
    output: IO[bytes] | None = None,
    inherited: Sequence[int] = (),
    leads_group: bool = True,
    beat_every_s: float = 0.0,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a role's process; it ends with the returned socket. Raises `OSError`.

    `output` takes its prints; `inherited` are descriptors that stay open in it.
    """
    launch = Launch(spec, life, address, [path for path in sys.path if path], orphan_grace_s, beat_every_s)
    ours, its = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tailrace.lifecycle.child"],
            stdin=its.fileno(),
            stdout=output,
            stderr=output,
            env=child_environment(spec),
            pass_fds=inherited,
            process_group=0 if leads_group else None,
            bufsize=0,
        )
    except OSError:
        ours.close()
        raise
    finally:
        its.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended already, which `call_on_exit` notices
        ours.sendall(msgspec.json.encode(launch) + b"\n")
    return process, ours


def child_environment(spec: RoleSpec) -> dict[str, str]:
    """The whole environment of a role's process."""
    devices = {} if spec.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(spec.devices)}
    return {
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, str(spec.threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **devices,
        **spec.environment,
    }


def loopback_environment() -> dict[str, str]:
    """Of processes of one machine that exchange tensors.

    gloo looks for an interface by this machine's name otherwise, which need not resolve.
    """
    return {"GLOO_SOCKET_IFNAME": _LOOPBACK.name} if _LOOPBACK.exists() else {}
