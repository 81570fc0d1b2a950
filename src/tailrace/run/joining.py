"""`tailrace join`: this machine has the trainer of a run whose other roles are elsewhere (placement = "redis").

Both see one Redis and one folder of runs, each under a path of its own. Each life of the trainer is asked for by a
notice in Redis; this command starts it as `tailrace train` does on one machine, and tells how it goes. It ends as the
run does, by the run's own summary.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import DataError, TransportError
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.launchers.redis import (
    BEAT_EVERY_S,
    Beat,
    FromMachine,
    KillRole,
    Notice,
    RoleLeft,
    RoleReady,
    StartRole,
    StopRole,
    ToMachine,
    notice_key,
)
from tailrace.reporting.summary import RunSummary, read_summary
from tailrace.run.folder import RunPaths
from tailrace.run.ownership import owner_in
from tailrace.run.roles import RoleSettings
from tailrace.transport.channels import Conversation, decode, encode, wait_until
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import require_redis, with_password
from tailrace.transport.redis.streams import Origin

_LOOK_S = 0.5
"""Between two looks for a notice."""
_NEXT_LIFE_S = 60.0
"""How long to wait for the next life of the role, or the run's summary, while nobody seems to run in its folder: a
client of NFS may show an old one for so long."""
_ORDERLY = (ExitCode.FINISHED, ExitCode.TERMINATED)


async def join(name: str, url: str, runs: Path, prefix: str, say: Callable[[str], None]) -> int:
    """Have the trainer of the run of that name, over all its lives; the exit status of the run.

    Where that is not known it is the role's, and 143 where that ended in order: the run was cut short, and may go on.
    Waits for the run to start. Raises `SettingsError` where Redis refuses, and `DataError` where the run's folder is
    not below `runs`.
    """
    url = with_password(url)
    await asyncio.to_thread(require_redis, url)
    place = RedisPlace(url, Origin(name, ""), prefix=prefix)
    say(f"waits for the run {name} to want a trainer")
    served: _Served | None = None
    status = int(ExitCode.FINISHED)
    while (notice := await _next_notice(place, served)) is not None:
        place.outage_s = notice.outage_s
        say(f"has the {notice.name} of the run {name}, life {notice.life}")
        machine = _Machine(place, notice, runs)
        served = _Served(notice, machine.folder)
        ended = await machine.run(_next_notice(place, served))
        status = status if ended is None else ended
    say(f"the trainer of the run {name} has ended, with status {status}")
    assert served is not None
    if (of_run := served.exit_status_of_run()) is None:
        return ExitCode.TERMINATED if status in _ORDERLY else status
    say(f"the run {name} has ended, with status {of_run}")
    return of_run


class _Served:
    """A notice that was served. Make it before its role starts: it tells by the summary whether the run ended since."""

    def __init__(self, notice: Notice, folder: Path) -> None:
        self.notice, self.folder = notice, folder
        self._before = self._summary()

    def exit_status_of_run(self) -> int | None:
        """None where the run has not ended, or did so without a summary."""
        summary = self._summary()
        return None if summary is None or summary == self._before else summary.exit_code

    def _summary(self) -> RunSummary | None:
        with contextlib.suppress(DataError, OSError):
            return read_summary(self.folder)
        return None


async def _next_notice(place: RedisPlace, served: _Served | None) -> Notice | None:
    """Waits for one that is not served yet; None where the run of one that was has ended, or is gone."""
    loop = asyncio.get_running_loop()
    owned_s = loop.time()
    with contextlib.closing(place.connect()) as connection:
        while served is None or loop.time() - owned_s < _NEXT_LIFE_S:
            found = await asyncio.to_thread(connection.one, "GET", notice_key(place))
            if isinstance(found, bytes):
                notice = decode(found, Notice)
                if served is None or notice != served.notice:
                    return notice
            if served is not None and await asyncio.to_thread(served.exit_status_of_run) is not None:
                return None
            if served is not None and await asyncio.to_thread(owner_in, served.folder) is not None:
                owned_s = loop.time()  # it evaluates, say, or waits before it starts the role again
            await asyncio.sleep(_LOOK_S)
    return None


class _Machine:
    """This machine, for one life of the role. Make it on a running event loop."""

    def __init__(self, place: RedisPlace, notice: Notice, runs: Path) -> None:
        self._paths = RunPaths(runs / notice.run)
        self.folder = self._paths.root
        if not self.folder.is_dir():
            raise DataError(
                f"the run {notice.run} is not below {runs}: name the folder that both machines see (--runs)"
            )
        self._place = RedisPlace(place.url, Origin(notice.run, notice.epoch), notice.outage_s, place.prefix)
        self._changed = asyncio.Event()
        self._start: StartRole | None = None
        self._handle: RoleHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard_s = asyncio.get_running_loop().time()
        self._channel: Conversation = self._place.open_channel(
            notice.address, bind=False, on_message=self._on_message, changed=self._changed, peer="orchestrator"
        )

    async def run(self, goes_on: Coroutine[Any, Any, Notice | None]) -> int | None:
        """From the order to start to the role's end, which the orchestrator is told; the role's exit status.

        None where no order comes before the run `goes_on` without this life of the role, or has ended: another machine
        had taken it, and may be lost.
        """
        going_on = asyncio.create_task(goes_on, name="next life")
        going_on.add_done_callback(lambda _: self._changed.set())
        try:
            await wait_until(self._changed, lambda: bool(self._start or self._channel.failure or going_on.done()))
            if self._start is None:
                if going_on.done():
                    going_on.result()  # raises where Redis is gone
                return None
            going_on.cancel()
            settings = self._own_settings(self._start.spec.settings)
            run = settings.run
            launcher = LocalLauncher(self._place.origin.epoch, self._paths.logs, run.shutdown)
            launcher.restarts = run.restarts
            async with launcher:
                spec = replace(self._start.spec, settings=msgspec.json.encode(settings))
                self._handle = launcher.start(spec, is_replaceable=True)
                return await self._until_left(self._handle, launcher.restarts.silence_s)
        finally:
            for task in (going_on, *self._tasks):
                task.cancel()
            await self._channel.close()

    async def _until_left(self, handle: RoleHandle, silence_s: float) -> int:
        """The orchestrator may be silent for so long while Redis is there; then its role is ended."""
        telling = asyncio.create_task(self._tell_ready(handle), name="ready")
        self._tasks.add(telling)
        left = asyncio.ensure_future(handle.left())
        while not left.done():
            self._tell(Beat())
            if self._is_alone(silence_s):
                await handle.stop()
            await asyncio.wait({left}, timeout=BEAT_EVERY_S)
        status = left.result()
        self._tell(RoleLeft(status, str(handle.early_exit())))
        return status

    async def _tell_ready(self, handle: RoleHandle) -> None:
        self._tell(RoleReady(await handle.ready()))

    def _is_alone(self, silence_s: float) -> bool:
        """Whether nobody wants this role any more: the run is over, or its orchestrator is gone."""
        now_s = asyncio.get_running_loop().time()
        if self._place.is_away:
            self._heard_s = now_s
        return self._channel.failure is not None or now_s - self._heard_s > silence_s

    def _on_message(self, message: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        decoded: ToMachine = decode(message, ToMachine)  # type: ignore[arg-type]
        match decoded:
            case StartRole():
                self._start = decoded
            case StopRole() if self._handle is not None:
                self._later(self._handle.stop())
            case KillRole() if self._handle is not None:
                self._later(self._handle.kill())

    def _tell(self, message: FromMachine) -> None:
        with contextlib.suppress(TransportError):  # the orchestrator is gone, which is noticed elsewhere
            self._channel.send(encode(message))

    def _later(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending, name="end of the role")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _own_settings(self, settings: bytes) -> RoleSettings:
        """The same, with this machine's paths and its way to Redis."""
        theirs = msgspec.json.decode(settings, type=RoleSettings)
        assert theirs.where is not None, "no transports"
        own = {
            name: str(self._paths.root / Path(getattr(theirs.where, name)).relative_to(theirs.run_folder))
            for name in ("shared_memory", "batch_files", "payloads")
        }
        where = msgspec.structs.replace(theirs.where, redis=self._place.url, **own)
        return msgspec.structs.replace(theirs, run_folder=str(self._paths.root), where=where)
