from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import httpx
import pytest

from tailrace.run.page import page_beside
from tests.support.made_runs import MadeRun

PATIENCE_S = 60.0


class Told(logging.Handler):
    """Waits for the first line that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.line: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.line.done():
            self.line.set_result(record.getMessage())


async def test_a_run_has_its_page_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeRun(folder=tmp_path / "run")
    run.write_steps(2)
    told, logger = Told(), logging.getLogger("tailrace.run.page")
    monkeypatch.setattr(logger, "handlers", [told])
    monkeypatch.setattr(logger, "level", logging.INFO)
    async with page_beside(True, run.folder, tmp_path / "dashboard.log"), httpx.AsyncClient() as client:
        async with asyncio.timeout(PATIENCE_S):
            line = await told.line
        link = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert link is not None, line
        found = (await client.get(f"{link.group()}api/runs")).json()
        assert [one["id"] for one in found["runs"]] == ["run"]
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(link.group())


async def test_without_being_asked_for_there_is_none(tmp_path: Path) -> None:
    async with page_beside(False, tmp_path, tmp_path / "dashboard.log"):
        assert not (tmp_path / "dashboard.log").exists()
