"""A program that waits to be stopped by signals: `stopping_program.py asyncio|uvloop waits|stuck`."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.signals import StopSignals


async def main(manner: str) -> int:
    stop = asyncio.Event()

    def abort(exit_code: ExitCode) -> None:
        print(f"aborted by {exit_code.name}", flush=True)
        os._exit(exit_code)

    def request_stop(exit_code: ExitCode) -> None:
        print(f"asked by {exit_code.name}", flush=True)
        stop.set()

    with StopSignals(request_stop, abort) as signals:
        print("ready", flush=True)
        while manner == "stuck":
            pass
        await stop.wait()
        if manner == "slow":
            await asyncio.Event().wait()
    return signals.exit_code or 0


if __name__ == "__main__":
    factory = uvloop.new_event_loop if sys.argv[1] == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        sys.exit(runner.run(main(sys.argv[2])))
