"""The dashboard: in a process beside the run, where `observability.ui` asks for it; and its views in the report."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from tailrace.cancelling import cancelled
from tailrace.extras import require_extra
from tailrace.reporting.report import ViewsOf
from tailrace.timeouts import timeout

_MODULE = "tailrace.dashboard.beside"
_START_S = 60.0
_END_S = 5.0
_logger = logging.getLogger(__name__)


def require_page(wanted: bool) -> None:
    """Raise `SettingsError` where the dashboard is asked for and what it needs is not installed."""
    for package in ("starlette", "uvicorn") if wanted else ():
        require_extra(package, extra="ui", what="observability.ui", key=("observability", "ui"))


def views_of_report() -> ViewsOf | None:
    """The dashboard's views of what the report shows; None where that package was removed."""
    if importlib.util.find_spec("tailrace.dashboard") is None:
        return None
    from tailrace.dashboard.report_views import report_views

    return report_views


@contextlib.asynccontextmanager
async def page_beside(wanted: bool, folder: Path, log: Path) -> AsyncIterator[None]:
    """The page is there inside; its link is logged. Nothing that goes wrong with it reaches the run."""
    process = await _started(folder, log) if wanted else None
    if process is None:
        yield
        return
    telling = asyncio.create_task(_tell_link(process, log), name="dashboard's link")
    try:
        yield
    finally:
        await cancelled(telling)
        await _end(process)


async def _started(folder: Path, log: Path) -> Process | None:
    try:
        with log.open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE, str(folder)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                start_new_session=True,
            )
    except OSError as error:
        _logger.warning("the dashboard cannot be started: %s", error)
        return None


async def _tell_link(process: Process, log: Path) -> None:
    assert process.stdout is not None
    try:
        async with timeout(_START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    if line:
        _logger.info(line.decode("utf-8", "replace").strip())
    else:
        _logger.warning("the dashboard did not start; %s says why", log)


async def _end(process: Process) -> None:
    """Its standard input closes, which it ends by; killed where it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
