"""The dashboard of one run, as a process beside it: it prints its link, and ends with what started it.

python -m tailrace.dashboard.beside runs/quickstart

Standard input is a pipe that nobody writes to: it closes when the run ends, however that happens.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tailrace.dashboard.serving import serve_dashboard
from tailrace.lifecycle.event_loop import first_done, run_on_event_loop


async def serve_until_closed(folder: Path) -> None:
    """At a free port of the loopback, until standard input is at its end."""
    await first_done(serve_dashboard(folder, "127.0.0.1:0", _say), _until_closed())


async def _until_closed() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    await reader.read()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_on_event_loop(serve_until_closed(Path(sys.argv[1])))
