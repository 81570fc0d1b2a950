"""`tailrace ui`: the page at an address, until it is stopped. It prints its link, and leaves signals to the command."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import anyio.to_thread
import uvicorn
from typing_extensions import override

from tailrace.dashboard.access import Access, Guarded
from tailrace.dashboard.application import Dashboard
from tailrace.dashboard.chat import ChatPlace
from tailrace.dashboard.names import as_text
from tailrace.dashboard.others import source_at
from tailrace.errors import DataError, SettingsError

_THREADS = 4
"""That read files: more would only fill more memory at once."""
_CLOSE_S = 1
DEFAULT_ADDRESS = "127.0.0.1:8420"


class _Server(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def require_folder(root: Path) -> None:
    """Raise `DataError` where there is neither a folder nor a file that can be shown."""
    if not root.is_dir() and source_at(root) is None:
        raise DataError(
            f"there is nothing to show at {as_text(root)}: name a run's folder, the one that runs are in, or a file of "
            "verifiers' (traces.jsonl, results.jsonl) or TRL's (completions_00005.parquet)"
        )


async def serve_dashboard(
    root: Path, address: str, say: Callable[[str], None], *, chat: ChatPlace | None = None
) -> int:
    """Answer until cancelled. Raises `DataError` without such a folder, `SettingsError` for an address out of reach."""
    require_folder(root)
    listener = _listen(address)
    host, port = listener.getsockname()[:2]
    access = Access.to_address(host)
    anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
    config = uvicorn.Config(
        Guarded(Dashboard(root, chat).application(), access),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config)
    say(f"{as_text(root)} is shown at {link(host, port, access.token)}")
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="dashboard")
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
    return 0


def link(host: str, port: int, token: str | None) -> str:
    """What a browser opens.

    >>> link("::1", 80, None), link("10.0.0.1", 80, "key")
    ('http://[::1]:80/', 'http://10.0.0.1:80/?token=key')
    """
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token)}" if token else "")


def _listen(address: str) -> socket.socket:
    """Where the default address is taken, at a free port beside it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"--address is {address!r}; it must be HOST:PORT, as {DEFAULT_ADDRESS}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()  # a machine's name may mean its IPv4 address alone
    try:
        return socket.create_server((host, int(port)), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and address == DEFAULT_ADDRESS:
            return socket.create_server((host, 0), family=family)
        raise SettingsError(f"--address: cannot listen at {address}: {error.strerror}") from error
