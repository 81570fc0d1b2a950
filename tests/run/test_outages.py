"""A service that agents call goes away: the run pauses, and goes on to its end where the service comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.records import RunStatus
from tailrace.scheduling import backoff
from tailrace.scheduling.backoff import FAILURES_IN_A_ROW, Backoff
from tests.run.runs import environment, run_inline

PAUSES_S = [0.05, 0.1, 0.2, 0.4]
RUNNING = 8
"""Rollouts at once."""


class Service:
    """Greets whoever connects; on one port, however often it is opened."""

    def __init__(self) -> None:
        self.port = 0
        self.greeted = 0
        self.is_used = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._greet, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.greeted += 1
        if self.greeted == RUNNING:
            self.is_used.set()
        writer.write(b"hello\n")
        writer.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[float]:
    """Seconds of each pause of an environment, as it begins; they are scaled down."""
    begun = asyncio.Queue[float]()
    failed = Backoff.failed

    def note(self: Backoff, environment: str, part: backoff.Part, *, now_s: float) -> float:
        if pause_s := failed(self, environment, part, now_s=now_s):
            begun.put_nowait(pause_s)
        return pause_s

    monkeypatch.setattr(Backoff, "failed", note)
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", PAUSES_S[0])
    monkeypatch.setattr(backoff, "LONGEST_PAUSE_S", PAUSES_S[-1])
    return begun


async def test_an_outage_costs_some_rollouts_and_the_run_goes_on_to_its_end(
    tmp_path: Path, pauses: asyncio.Queue[float]
) -> None:
    service = Service()
    await service.open()
    called = (*environment("calling"), "--environment.args.port", str(service.port))
    run = asyncio.create_task(run_inline(tmp_path, *called, "--max_steps", "10"))
    await service.is_used.wait()
    await service.close()
    begun = [await pauses.get()]
    while begun[-1] < PAUSES_S[-1]:
        begun.append(await pauses.get())
    # A group tried between each two of them; one that had connected before may have ended after the first, and well.
    assert begun[-len(PAUSES_S) :] == PAUSES_S
    await service.open()
    summary = await run
    await service.close()
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FINISHED, 0, 10)
    assert summary.ledger.balances
    failed = summary.ledger.by_reason["failed"]
    assert failed.keys() == {"environment_failed"}
    tries, streaks = len(begun) + pauses.qsize(), begun.count(PAUSES_S[0])
    most = streaks * (FAILURES_IN_A_ROW + 2 * RUNNING) + 4 * tries
    assert FAILURES_IN_A_ROW <= failed["environment_failed"] <= most
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    assert log.count("'calling' all failed: it pauses") == log.count("'calling' works again") == streaks


async def test_an_outage_that_outlives_its_time_ends_the_run_and_names_what_failed(
    tmp_path: Path, pauses: asyncio.Queue[float]
) -> None:
    service = Service()
    await service.open()
    await service.close()
    called = (*environment("calling"), "--environment.args.port", str(service.port))
    summary = await run_inline(tmp_path, *called, "--max_steps", "10", "--scheduling.max_failing_s", "0.5")
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FAILED, 1, 0)
    assert "(scheduling.max_failing_s) rollouts failed and none came back" in summary.reason
    assert "ConnectionRefusedError" in summary.reason
    assert summary.ledger.balances
