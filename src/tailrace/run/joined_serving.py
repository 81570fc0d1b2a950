"""`tailrace serve --join`: a generator that joins a run which goes on, serves it, and leaves it.

    asks to join         ──► its settings ──► builds the engine, listens ──► the run connects, sends requests
    SIGTERM ──► asks the run to let it go ──► its requests move on ──► the run closes it

It ends when the run lets it go, is over, or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias
from urllib.parse import urlsplit

import msgspec

from tailrace.config import RUNS, own_settings
from tailrace.config.serving import joined_settings
from tailrace.errors import LifecycleError, SettingsError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import Engine
from tailrace.generation.rpc.messages import PROTOCOL
from tailrace.generation.rpc.server import GeneratorServer, StandAlone
from tailrace.generation.rpc.uploads import UploadedModelStateDicts
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.guards import guarded, read_at_most
from tailrace.lifecycle.event_loop import first_done
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.signals import StopSignals
from tailrace.models.identity import identify
from tailrace.models.loading import require_weights
from tailrace.run.engines import engine_factory
from tailrace.run.folder import RunPaths
from tailrace.run.host_transports import GeneratorEnds, HostTransports
from tailrace.run.join_requests import Accepted, Announce, Apply, JoinClient, JoinPlace, Offer, Release, Withdraw
from tailrace.run.roles import RoleSettings
from tailrace.timeouts import timeout
from tailrace.transport.channels import ipc_address
from tailrace.transport.keys import CurveKeys, is_of_this_machine, read_keys, require_safe_address
from tailrace.transport.owned_folders import own_shared_memory, own_socket_folder, remove_leftovers
from tailrace.transport.payloads.store import MemoryPayloadStore

WAITS_S = 300.0
"""How long to wait for a run that may start later."""
_LOOK_S = 0.5
_WITHDRAWS_S = 5.0
"""For the run to hear that one does not come; else it finds out by itself."""
_EVERYWHERE = ("0.0.0.0", "::")
_USED_WITHIN_S = 60.0
"""Once the engine is built."""
_LEAVES_WITHIN_S = 25.0
"""Below what cluster schedulers give between SIGTERM and SIGKILL."""

MakeEngine: TypeAlias = Callable[[ModelSettings, GeneratorSettings], Callable[[], Engine]]
ReportProgress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What `tailrace serve --join` was given."""

    run: str
    """A run's folder or name, or the address of a run on another host."""
    key: Path | None = None
    """The run's key file, for an address."""
    address: str | None = None
    """Where to listen, of an address of the run that is not of this host; else a socket of its own is made."""
    model: str | None = None
    """In place of the run's `model.name`: the same model, elsewhere."""
    overrides: Sequence[str] = ()
    runs: Path = RUNS
    asked_by: str = "--join"
    """What errors begin with."""


async def serve_run(
    options: JoinOptions,
    report_progress: ReportProgress,
    *,
    make_engine: MakeEngine = engine_factory,
    waits_s: float = WAITS_S,
) -> int:
    """Join the run, serve it to the end; the exit status. Raises `SettingsError`, `LifecycleError`.

    `report_progress` is called with a line for people at each step.
    """
    await asyncio.to_thread(remove_leftovers)
    with own_socket_folder(uuid.uuid4().hex) as sockets:
        keys, where = await _found(options, report_progress, waits_s)
        if options.address is not None:
            has_keys = keys is not None
            require_safe_address(options.address, has_keys=has_keys, setting="--address", key_setting="--key")
        _require_reachable(options.address, where)
        async with JoinClient(where, keys) as client:
            await client.connected(waits_s)
            offer = await client.ask(Apply(PROTOCOL))
            assert isinstance(offer, Offer)
            async with _withdrawn_on_error(client, offer):
                settings = joined_settings(offer.settings, options.model, options.overrides)
                await asyncio.to_thread(require_weights, settings.model.name)
                announced = Announce(
                    name=offer.name,
                    life=offer.life,
                    address=options.address or ipc_address(sockets.path, "generator"),
                    model=await asyncio.to_thread(identify, settings.model.name),
                    slots=settings.generator.concurrency,
                    max_model_tokens=settings.max_model_tokens,
                )
                await client.ask(announced)
        report_progress(f"joins the run {offer.run} as {offer.name}: its engine is built")
        with _ends(offer, keys) as (ends, stand_alone):
            generator = Generator(
                make_engine(settings.model, settings.generator),
                settings.generator.weights,
                payloads=ends.payloads,
            )
            try:
                server = GeneratorServer(
                    generator,
                    ends.open,
                    announced.address,
                    model=announced.model,
                    report_every_s=settings.generator.router.report_every_s,
                    stand_alone=stand_alone,
                    forwarded=ends.forwarded,
                    has_joined=True,
                )
                status = await _until_let_go(server, generator, report_progress)
            finally:
                await generator.close()
        report_progress(
            f"has left the run {offer.run}: {server.closing.reason if server.closing else 'it was stopped'}"
        )
        return status


@contextlib.asynccontextmanager
async def _withdrawn_on_error(client: JoinClient, offer: Offer) -> AsyncIterator[None]:
    """What is wrong with one generator keeps no place from the next, which may be the same without the mistake."""
    try:
        yield
    except BaseException:  # a signal, too
        with contextlib.suppress(SettingsError, TimeoutError):
            async with timeout(_WITHDRAWS_S):
                await client.ask(Withdraw(offer.name, offer.life))
        raise


def _require_reachable(address: str | None, run: str) -> None:
    """Raise `SettingsError` where a run at this address could not connect to a generator that listens there.

    >>> _require_reachable(None, "tcp://127.0.0.1:5800")
    >>> _require_reachable("tcp://10.0.0.7:5757", "tcp://10.0.0.5:5800")
    """
    if address is None and not is_of_this_machine(run):
        raise SettingsError(
            f"--address: the run at {run} connects to this generator: say where, as in tcp://THIS_HOST:5757"
        )
    if address is not None and urlsplit(address).hostname in _EVERYWHERE:
        raise SettingsError(
            f"--address = {address} stands for all addresses of this host, and a run connects to one: name that"
        )


async def release(run: str, name: str, key: Path | None, runs: Path = RUNS) -> None:
    """Ask a run to let one of its generators go. Raises `SettingsError` where it refuses, or is not there."""
    options = JoinOptions(run, key, runs=runs, asked_by="leave")
    keys, where = await _found(options, lambda said: None, 0.0)
    async with JoinClient(where, keys, options.asked_by) as client:
        await client.connected(_USED_WITHIN_S)
        answer = await client.ask(Release(name, "`tailrace leave` asked for it"))
    assert isinstance(answer, Accepted)


async def _found(options: JoinOptions, report_progress: ReportProgress, waits_s: float) -> tuple[CurveKeys | None, str]:
    """The run's key, where there is one, and where the run listens. Raises `SettingsError`."""
    keys = read_keys(options.key, "--key") if options.key is not None else None
    if "://" in options.run:
        require_safe_address(options.run, has_keys=keys is not None, setting=options.asked_by, key_setting="--key")
        return keys, options.run
    place = await _wait_for_run(_folder(options), report_progress, waits_s, options.asked_by)
    if _is_here(place):
        return None, place.here
    if keys is None:
        raise SettingsError(
            f"{options.asked_by}: the run is on another host: give the file of its generator.join_key (--key)"
        )
    return keys, place.elsewhere


def _folder(options: JoinOptions) -> Path:
    given = Path(os.path.expanduser(options.run))
    return given if given.is_dir() or os.sep in options.run else options.runs / options.run


async def _wait_for_run(folder: Path, report_progress: ReportProgress, waits_s: float, asked_by: str) -> JoinPlace:
    """Wait for the run to take generators in; where. Raises `SettingsError` where it does not, or none is there."""
    path, loop = RunPaths(folder).join, asyncio.get_running_loop()
    deadline_s, has_said = loop.time() + waits_s, False
    while (place := await asyncio.to_thread(_read, path, asked_by)) is None or not (_is_here(place) or place.elsewhere):
        chosen = await asyncio.to_thread(own_settings, folder)
        if chosen is not None and not chosen.generator.replicas.may_join:
            raise SettingsError(
                f"{asked_by}: the run in {folder} takes no generators in: it has generator.replicas = "
                f"{chosen.generator.replicas.max}; write generator.replicas = {{min = ..., max = ...}}"
            )
        if loop.time() >= deadline_s:
            raise SettingsError(
                f"{asked_by}: no run takes generators of this host in, by {path}; for those of other hosts it needs "
                "generator.join_address and generator.join_key"
            )
        if not has_said:
            report_progress(f"waits for the run in {folder}")
            has_said = True
        await asyncio.sleep(_LOOK_S)
    return place


def _read(path: Path, asked_by: str) -> JoinPlace | None:
    """None where there is none."""
    if not path.exists():
        return None
    with guarded(f"{asked_by}: {path} does not tell how to join a run", SettingsError):
        return msgspec.json.decode(read_at_most(path, 1 << 16), type=JoinPlace)


def _is_here(place: JoinPlace) -> bool:
    """What a run left that was killed does not count."""
    return Path(place.here.removeprefix("ipc://")).exists()


@contextlib.contextmanager
def _ends(offer: Offer, keys: CurveKeys | None) -> Iterator[tuple[GeneratorEnds, StandAlone | None]]:
    """Where weights come from and payloads go: the memory of the run's host, or the generator's own socket."""
    if offer.role:
        transports = msgspec.json.decode(offer.role, type=RoleSettings).transports()
        assert isinstance(transports, HostTransports)
        with transports.generator_ends(f"{offer.name}.{offer.life}") as ends:
            yield ends, None
        return
    with own_shared_memory(uuid.uuid4().hex) as shared_memory, contextlib.ExitStack() as stack:
        uploads, payloads = UploadedModelStateDicts(shared_memory.path), MemoryPayloadStore()
        stack.callback(uploads.close)
        yield GeneratorEnds(uploads.open, payloads, payloads), StandAlone(None, uploads, keys)


async def _until_let_go(server: GeneratorServer, generator: Generator, report_progress: ReportProgress) -> int:
    """Serve until the run closes it, which a first signal asks for; a second one ends it at once."""
    leaving = asyncio.Event()

    def end_at_once(code: ExitCode) -> NoReturn:
        os._exit(code)

    with StopSignals(lambda code: leaving.set(), abort=end_at_once) as signals:
        await first_done(server.serve(), _require_use(server, generator, report_progress), _leave(server, leaving))
    if signals.exit_code is not None:
        return signals.exit_code
    return ExitCode.FINISHED if server.closing is not None and server.closing.in_order else ExitCode.FAILED


async def _require_use(server: GeneratorServer, generator: Generator, report_progress: ReportProgress) -> NoReturn:
    """Waits for the engine to be built, and for the run to use it. Raises what building it raised, `LifecycleError`."""
    await generator.ready()
    try:
        async with timeout(_USED_WITHIN_S):
            await server.used.wait()
    except TimeoutError:
        raise LifecycleError(f"the run did not connect to {server.address} within {_USED_WITHIN_S:g} s") from None
    report_progress("serves the run")
    await asyncio.Future()
    raise AssertionError("nobody ends it")


async def _leave(server: GeneratorServer, leaving: asyncio.Event) -> None:
    """Waits for a signal to stop, and then for the run to let this generator go; not for one that it never used."""
    await leaving.wait()
    if server.used.is_set():
        server.ask_to_leave("it was asked to stop")
        await asyncio.sleep(_LEAVES_WITHIN_S)
