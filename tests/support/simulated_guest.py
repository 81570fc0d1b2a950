"""`tailrace serve --join` with an engine that has no model: `python -m tests.support.simulated_guest RUN`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.lifecycle.exit_codes import exit_code_of
from tailrace.run.joined_serving import JoinOptions, serve_run


def main(run: str, key: str = "", address: str = "") -> int:
    """Its exit status, as the command's."""
    guest = JoinOptions(run, Path(key) if key else None, address or None, overrides=["--generator.slots", "4"])
    try:
        return asyncio.run(
            serve_run(
                guest,
                lambda said: print(said, flush=True),
                make_engine=lambda model, generator: lambda: SimulatedEngine(slots=4, step_s=0.002, chunk_tokens=8),
                waits_s=20.0,
            )
        )
    except TailraceError as error:
        print(error, flush=True)
        return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
