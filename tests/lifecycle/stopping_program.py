"""A program that waits to be stopped by signals: `stopping_program.py asyncio|uvloop MANNER`."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.signals import Stopped, StopSignals, until_stopped


async def main(manner: str) -> int:
    stop = asyncio.Event()

    def abort(exit_code: ExitCode) -> None:
        # a signal may come within a `print` that is under way, and then another one raises
        os.write(sys.stdout.fileno(), f"aborted by {exit_code.name}\n".encode())
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


async def deaf() -> int:
    """Takes no notice of being cancelled, and then begins what handles signals by itself."""
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("took no notice", flush=True)
    return await main("waits")


async def whole(manner: str) -> int:
    if not manner.startswith("around"):
        return await main(manner)
    work = {"around-deaf": deaf, "around-waits": waits, "around-closes": closes}.get(manner, asleep)()
    try:
        return await until_stopped(work)
    except Stopped as stopped:
        print(f"stopped by {stopped.code.name}", flush=True)
        return stopped.code


async def waits() -> int:
    return await main("waits")


async def closes() -> int:
    """What handled a signal by itself has ended, and not yet the command."""
    await main("waits")
    return await asleep()


async def asleep() -> int:
    print("ready", flush=True)
    await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    factory = uvloop.new_event_loop if sys.argv[1] == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        sys.exit(runner.run(whole(sys.argv[2])))
