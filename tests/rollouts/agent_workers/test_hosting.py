"""Agent workers whose processes are started by a host, over sockets with keys: as on this machine, by value."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import zmq.asyncio
from typing_extensions import override

from tailrace.errors import LifecycleError, WorkerLost
from tailrace.free_ports import free_port
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.agent_workers.hosting import HostClient, HostedProcess, WorkerHost
from tailrace.rollouts.agent_workers.places import LocalPlace, LocalProcess, WorkerPlace
from tailrace.tracing.output_log import OutputLog
from tailrace.transport.keys import CurveKeys, guard_all
from tests.rollouts.agent_workers.played import GONE_S, PATIENCE_S, Run, processes, until
from tests.rollouts.agent_workers.test_playing import assert_equal_rollouts
from tests.support.descendants import still_run

BLOCK_S = 2.0
START_S = 0.5


class HostHere(WorkerPlace):
    """A host in this very process, and another one once it is lost."""

    def __init__(self, keys: CurveKeys) -> None:
        self.local = LocalPlace(None, shares_memory=False)
        """Where the host starts processes."""
        self._keys = keys
        self._client: HostClient | None = None
        self._serving: asyncio.Task[None] | None = None

    @override
    async def start(self, protocol: asyncio.Protocol) -> HostedProcess:
        if self._client is None:
            host = WorkerHost("tcp://127.0.0.1:0", self._keys, self.local)
            self._serving = asyncio.create_task(host.serve())
            self._client = HostClient(host.address, self._keys, "host")
        return self._client.begin(protocol)

    @override
    async def close(self) -> None:
        if self._client is not None and self._serving is not None:
            await self._client.close()
            await self._serving  # which misses the other end
            self._client = None

    async def lose(self) -> None:
        """As a node that loses its power."""
        assert self._client is not None
        assert self._serving is not None
        client, self._client = self._client, None
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        client.lose(await client.lost())
        await client.close()


class NobodyThere(WorkerPlace):
    """A host that cannot be reached: another one each time, as soon as one is lost."""

    def __init__(self) -> None:
        self._client: HostClient | None = None
        self.reached = 0

    @override
    async def start(self, protocol: asyncio.Protocol) -> HostedProcess:
        if self._client is None or not self._client.is_alive:
            await self.close()
            self._client = HostClient(f"tcp://127.0.0.1:{free_port()}", None, "host")
            self.reached += 1
        return self._client.begin(protocol)

    @override
    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class BusyPlace(LocalPlace):
    """Of a machine that takes its time to start a process."""

    @override
    async def start(self, protocol: asyncio.Protocol) -> LocalProcess:
        await asyncio.sleep(START_S)
        return await super().start(protocol)


@pytest.fixture
async def place() -> AsyncIterator[HostHere]:
    keys = CurveKeys.make()
    end_guard = guard_all(zmq.asyncio.Context.instance(), keys)
    yield HostHere(keys)
    end_guard()


def worker_of(before: Iterable[psutil.Process]) -> psutil.Process:
    """The process that plays, which this one has started by its host."""
    (found,) = processes() - {*before}
    return found


@pytest.mark.parametrize("behave", ["well", "much"])
async def test_a_rollout_is_the_same_through_a_host_and_on_the_loop(
    renderer: ChatRenderer, place: HostHere, behave: str
) -> None:
    replies = ["yes and stop there", "no", "maybe"]
    async with Run(renderer, workers=0, chunk_tokens=1) as run:
        here = await run.rollout(behave, replies)
    async with Run(renderer, places=[place], chunk_tokens=1) as run:
        hosted = await run.rollout(behave, replies)
        assert run.agents.pids() == {}  # not of this machine, as far as the orchestrator knows
    assert_equal_rollouts(here, hosted)


@pytest.mark.parametrize(
    ("behave", "where"),
    [
        ("sleep", r"its event loop was held for over 2 s .* by misbehave"),
        ("crash", r"died of SIGSEGV in misbehave \(.*agent_environments.py:\d+\) while it ran rollout agents-0"),
    ],
)
async def test_what_ends_a_process_is_known_and_another_one_takes_its_place(
    renderer: ChatRenderer, place: HostHere, behave: str, where: str
) -> None:
    async with Run(renderer, places=[place], block_s=BLOCK_S) as run:
        run.held.add("agents-1")
        lost = await asyncio.gather(run.begin(behave), run.begin(), return_exceptions=True)
        assert [error.is_blameless for error in lost if isinstance(error, WorkerLost)] == [False, True]
        with pytest.raises(WorkerLost, match=where):
            raise lost[0]  # type: ignore[misc]
        assert (await run.rollout()).turns == 2
        assert run.agents.flush_figures()[0].restarts == 1


async def test_a_process_that_is_stopped_is_killed_there(renderer: ChatRenderer, place: HostHere) -> None:
    before = processes()
    async with Run(renderer, places=[place], block_s=BLOCK_S) as run:
        run.held.add("agents-0")
        held = run.begin()
        await run.asked["agents-0"].wait()
        os.kill(worker_of(before).pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="agent worker 0 was killed: it said nothing for"):
            await held
        assert (await run.rollout()).turns == 2


async def test_a_process_that_is_killed_while_its_host_starts_it_ends_at_once(place: HostHere) -> None:
    place.local = BusyPlace(None, shares_memory=False)
    process = await place.start(asyncio.Protocol())
    process.kill()
    try:
        async with asyncio.timeout(PATIENCE_S):
            end = await process.ended()
    finally:
        await place.close()
    assert end.status == -signal.SIGKILL


async def test_a_host_that_was_reached_may_take_its_time_to_end_a_process(
    place: HostHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.local = BusyPlace(None, shares_memory=False)
    try:
        first = await place.start(asyncio.Protocol())
        first.kill()
        await first.ended()
        monkeypatch.setattr("tailrace.rollouts.agent_workers.hosting.KILLED_S", START_S / 10)
        second = await place.start(asyncio.Protocol())
        second.kill()
        async with asyncio.timeout(PATIENCE_S):
            end = await second.ended()
    finally:
        await place.close()
    assert (end.status, end.lost_with) == (-signal.SIGKILL, "")


async def test_a_process_that_is_asked_tells_there_where_its_agents_wait(
    renderer: ChatRenderer, place: HostHere, tmp_path: Path
) -> None:
    log = tmp_path / "agent-worker-0.output.log"
    with closing(OutputLog(log)) as output:
        place.local = LocalPlace(output, shares_memory=False)
        async with Run(renderer, places=[place]) as run:
            waiting = run.begin("wait")
            async with asyncio.timeout(PATIENCE_S):
                while not log.exists() or "in misbehave\n    await asyncio.sleep(600)" not in log.read_text():
                    run.rollouter.write_stacks()
                    await asyncio.sleep(0.05)
            waiting.cancel()
    assert "thread 0x" in log.read_text().lower()


async def test_a_host_that_is_lost_costs_what_its_worker_held_and_leaves_no_process(
    renderer: ChatRenderer, place: HostHere
) -> None:
    before = processes()
    async with Run(renderer, places=[place]) as run:
        run.held.add("agents-0")
        held = run.begin()
        await run.asked["agents-0"].wait()
        worker = worker_of(before)
        await place.lose()
        with pytest.raises(WorkerLost, match="agent worker 0 is lost: the host ended or closed its end"):
            await held
        assert await asyncio.to_thread(still_run, [worker], GONE_S) == []
        assert run.aborted == ["agents-0"]
        assert (await run.rollout()).turns == 2


async def test_a_host_that_cannot_be_reached_keeps_no_start_waiting(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.rollouts.agent_workers.hosting.KILLED_S", 0.5)
    nobody = NobodyThere()
    async with asyncio.timeout(PATIENCE_S), Run(renderer, places=[nobody], start_timeout_s=1.0) as run:
        lost = r"its host does not answer: .*: it was not ready within 1 s \(rollouts\.worker_start_timeout_s\)"
        with pytest.raises(LifecycleError, match=f"agent worker 0 is lost: {lost}"):
            await run.agents.start()
    assert nobody.reached == 2


async def test_a_host_that_cannot_be_reached_keeps_no_end_waiting(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.rollouts.agent_workers.hosting.KILLED_S", 0.5)
    monkeypatch.setattr("tailrace.rollouts.agent_workers.worker.CLOSE_S", 0.5)
    async with asyncio.timeout(PATIENCE_S), Run(renderer, places=[nobody := NobodyThere()]) as run:
        starting = asyncio.create_task(run.agents.start())
        await until(lambda: nobody.reached == 1)
        starting.cancel()
        await asyncio.wait({starting})


async def test_an_orchestrator_that_goes_away_leaves_no_process(renderer: ChatRenderer, place: HostHere) -> None:
    before = processes()
    async with Run(renderer, places=[place]) as run:
        await run.rollout()
        worker = worker_of(before)
        await place.close()
        assert await asyncio.to_thread(still_run, [worker], GONE_S) == []
