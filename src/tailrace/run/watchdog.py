"""The last resort against a silent hang: a run in which nothing moves for long ends, and says who waited for what."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
from pathlib import Path

from tailrace.errors import LifecycleError
from tailrace.reporting.live import Stillness, describe_stillness
from tailrace.run.composition import ComposedRun
from tailrace.timeouts import timeout
from tailrace.tracing.stacks import write_task_stacks

_LOOK_EVERY_S = 1.0
_WRITES_S = 10.0
"""How long stacks may take to be written."""


async def end_when_still(run: ComposedRun, watchdog_s: float) -> None:
    """Wait until nothing has moved for so long; then fail the run, once every process wrote where it stands."""
    stillness, still_s = Stillness(), 0.0
    while still_s < watchdog_s:
        pause_s = min(_LOOK_EVERY_S, watchdog_s - still_s)
        await asyncio.sleep(pause_s)
        view = run.view()
        still_s = stillness.look(view, pause_s)
    logs = run.ground.paths.logs
    with contextlib.suppress(OSError, TimeoutError):  # a disk that takes nothing may be what all wait for
        async with timeout(_WRITES_S):
            await _write_stacks(run, logs / "orchestrator.log")
    why = f"{describe_stillness(view, still_s)} (observability.watchdog_s)"
    await run.orchestrator.fail(LifecycleError(f"{why}; where every process stood is at the end of its log in {logs}"))


async def _write_stacks(run: ComposedRun, own_log: Path) -> None:
    """Of every process, into its log. Raises `OSError`."""
    run.rollouter.write_stacks()
    await run.roles.write_stacks()
    waiting = io.StringIO()
    write_task_stacks(waiting)
    await asyncio.to_thread(_write_own_stacks, own_log, waiting.getvalue())


def _write_own_stacks(log: Path, waiting: str) -> None:
    """Of all threads of this process, and of what waits on its event loop."""
    with log.open("a", encoding="utf-8") as file:
        faulthandler.dump_traceback(file)
        file.write(waiting)
