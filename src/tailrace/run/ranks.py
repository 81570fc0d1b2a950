"""Processes that run one engine in lockstep: rank 0 leads, and torchrun or `lead` itself starts the others.

    rank 0: Generator, or `tailrace serve` ── LockstepEngine ──→ rank 1, 2, ...: follow()

Followers end with rank 0, and ignore SIGINT and SIGTERM. A follower that dies while engines are built leaves rank 0
waiting in the engine's own rendezvous, which only the end of the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tailrace.child_processes import describe_exit
from tailrace.config.serving import ServeSettings
from tailrace.errors import EngineFailed, SettingsError
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.devices import visible_devices
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.processes import loopback_environment, spawn_role
from tailrace.lifecycle.roles import RoleSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from tailrace.generation.engines.protocol import Engine
    from tailrace.generation.lockstep.engine import LockstepEngine
    from tailrace.generation.lockstep.lifeline import Lifeline
    from tailrace.generation.lockstep.ranks import RankGroup

_logger = logging.getLogger(__name__)

FOLLOWER = "tailrace.run.engines:follower"
_OWN_ERROR_S = 2.0
"""Within which a rank that lost another may end by itself, with its own error."""
_CLOSE_S = 10.0
"""How long closing waits for a rank's process to end."""


class Rank(msgspec.Struct, frozen=True):
    """One process of an engine, and where all of them meet."""

    number: int
    size: int
    host: str
    port: int
    local: int = 0
    """Its number on its own machine."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torch and vLLM read."""
        return {
            "RANK": str(self.number),
            "LOCAL_RANK": str(self.local),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
        }


class FollowerSettings(msgspec.Struct, frozen=True):
    """What a process that `lead` starts is given."""

    rank: Rank
    settings: str
    """`ServeSettings` as JSON: the sections that an engine is made from."""


def torchrun_rank(generator: GeneratorSettings, environment: Mapping[str, str] = os.environ) -> Rank | None:
    """This process among those of torchrun; None if started alone. Raises `SettingsError` where settings disagree."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank = Rank(
        number=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        host=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        local=int(environment["LOCAL_RANK"]),
    )
    if rank.size == 1 and not generator.lockstep:
        return None
    if not generator.lockstep:
        raise SettingsError(
            f"torchrun started {rank.size} processes, and each would serve alone: set generator.lockstep = true and "
            f"generator.tensor_parallel = {rank.size}, or start one"
        )
    if rank.size != generator.tensor_parallel:
        raise SettingsError(
            f"generator.tensor_parallel is {generator.tensor_parallel}, and torchrun started {rank.size} processes: "
            "give both the same number"
        )
    return rank


def lead(build: Callable[[], Engine], settings: ServeSettings, torchrun: Rank | None = None) -> LockstepEngine:
    """Build rank 0's engine, which drives all ranks, in the thread that steps it; starts them without `torchrun`."""
    import torch.distributed as dist

    from tailrace.generation.lockstep.engine import LockstepEngine

    if torchrun is not None:
        return LockstepEngine(*_joined(build, torchrun, _store_of(torchrun)))
    for name, value in loopback_environment().items():
        os.environ.setdefault(name, value)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    rank = Rank(number=0, size=settings.generator.tensor_parallel, host="127.0.0.1", port=store.port)
    followers = _Followers(settings, rank)
    with contextlib.ExitStack() as unless_built:
        unless_built.callback(followers.end)
        joined = _joined(build, rank, store)
        unless_built.pop_all()
    followers.built()
    return LockstepEngine(*joined, on_closed=followers.end_in_order)


def follow_rank(build: Callable[[], Engine], rank: Rank) -> None:
    """Do what rank 0 does, until it ends. Raises `EngineFailed` when any rank fails; ends the process if it cannot."""
    from tailrace.generation.lockstep.engine import follow

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(*_joined(build, rank, _store_of(rank)))


class _Followers:
    """The processes of all other ranks, in this one's process group. Their output is this process's."""

    def __init__(self, settings: ServeSettings, leader: Rank) -> None:
        self._is_ending = False
        self._settled = threading.Event()
        text = settings.model_dump_json()
        self._processes = [  # with the sockets whose end of file says that this process is gone
            _start(FollowerSettings(msgspec.structs.replace(leader, number=number, local=number), text))
            for number in range(1, leader.size)
        ]
        self._waits = []
        for number, (process, _) in enumerate(self._processes, 1):
            name = f"tailrace-rank-{number}-exit"
            self._waits.append(threading.Thread(target=self._wait_for, args=(number, process), name=name, daemon=True))
            self._waits[-1].start()

    def built(self) -> None:
        """All ranks have joined: from now on the lifeline notices one that dies."""
        self._settled.set()

    def end_in_order(self) -> None:
        """Rank 0 asked them to close: wait for that, and kill those that do not."""
        for wait in self._waits:
            wait.join(_CLOSE_S)
        self.end()

    def end(self) -> None:
        """Kill them: rank 0 could not be built, or they did not close in time."""
        self._is_ending = True
        self._settled.set()
        for process, _ in self._processes:
            process.kill()

    def _wait_for(self, number: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status == 0 or self._is_ending:
            return
        _logger.error("rank %d of the engine left early, %s", number, describe_exit(status))
        if not self._settled.wait(_OWN_ERROR_S):  # rank 0 may fail with the same error, and raise it
            logging.shutdown()
            os._exit(ExitCode.FAILED)


def _leave(number: int, lost: EngineFailed) -> None:
    """End a follower whose rank 0 died: it may be stuck in a step."""
    threading.Event().wait(_OWN_ERROR_S)
    _logger.error("rank %d of the engine ends: %s", number, lost)
    logging.shutdown()
    os._exit(ExitCode.FAILED)


def _joined(build: Callable[[], Engine], rank: Rank, store: Store) -> tuple[Engine, RankGroup, Lifeline]:
    """Meet the other ranks, then build this one's engine."""
    from tailrace.generation.lockstep.lifeline import Lifeline
    from tailrace.generation.lockstep.ranks import join_ranks

    os.environ.update(rank.environment)
    lifeline = Lifeline(store, rank.number, rank.size)
    if rank.number:
        lifeline.watch(partial(_leave, rank.number))
    return build(), join_ranks(store, rank.number, rank.size), lifeline


def _store_of(rank: Rank) -> Store:
    import torch.distributed as dist

    store: Store = dist.TCPStore(rank.host, rank.port, is_master=False)  # type: ignore[attr-defined]
    return store


def _start(follower: FollowerSettings) -> tuple[subprocess.Popen[bytes], socket.socket]:
    generator = ServeSettings.model_validate_json(follower.settings).generator
    spec = RoleSpec(
        f"rank {follower.rank.number}",
        FOLLOWER,
        msgspec.json.encode(follower),
        threads=generator.threads,
        environment={**follower.rank.environment, **own_device(generator, follower.rank)},
    )
    return spawn_role(spec, orphan_grace_s=_OWN_ERROR_S, leads_group=False)


def own_device(generator: GeneratorSettings, rank: Rank) -> dict[str, str]:
    """Variables by which a rank of the torch engine sees its own GPU alone; vLLM picks it among all by LOCAL_RANK."""
    pool = visible_devices(os.environ)
    if generator.engine != "torch" or not generator.device.startswith("cuda") or not pool:
        return {}
    return {"CUDA_VISIBLE_DEVICES": pool[rank.local % len(pool)]}
