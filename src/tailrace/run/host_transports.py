"""Transports between processes: sockets at the launcher's addresses, bytes in folders that all of them see."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import zmq.asyncio
from typing_extensions import override

from tailrace.config import RunSettings
from tailrace.errors import TransportError
from tailrace.generation.rpc.client import BringWeights, GeneratorClient, ReportListener
from tailrace.generation.rpc.server import GeneratorServer, OpenModelStateDict
from tailrace.lifecycle.launchers import Launcher
from tailrace.lifecycle.node_weights import WeightsOfNodes
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.records import ModelStateDictRef
from tailrace.rollouts.agent_workers.hosting import HostClient, WorkerHost
from tailrace.rollouts.agent_workers.places import LocalPlace
from tailrace.run.folder import RunPaths, announcement_file, writing
from tailrace.run.ownership import Owner
from tailrace.run.transports import BATCHES_AHEAD, MakeGenerator, TrainerEnds, Transports
from tailrace.timeouts import timeout
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender, rank_address
from tailrace.transport.batches.stores import (
    BatchSource,
    BatchStore,
    FileSource,
    FileStore,
    SharedMemoryStore,
    ValueSource,
    ValueStore,
)
from tailrace.transport.channels import Channel, OpenChannel, require_listener
from tailrace.transport.events.log import MemoryEventLog
from tailrace.transport.events.rpc import ConversingEventLogServer, EventLogClient, EventLogServer
from tailrace.transport.keys import CurveKeys, guard_all
from tailrace.transport.owned_folders import (
    NodeFolder,
    node_memory,
    own_payload_folder,
    own_shared_memory,
    remove_leftovers,
)
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.slab_store import FOLDER, OverflowingPayloadStore, SlabPayloadStore
from tailrace.transport.payloads.store import MemoryPayloadStore, PayloadStore
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.connection import memory_bound, require_redis, with_password
from tailrace.transport.redis.feed_place import FeedPlace
from tailrace.transport.redis.run_names import own_run_name
from tailrace.transport.redis.sample_sender import RedisSampleSender
from tailrace.transport.redis.streams import Origin
from tailrace.transport.samples.stream import SampleSender
from tailrace.transport.weights.lending import LendingFigures, ModelStateDictLender
from tailrace.transport.weights.stores import (
    ModelStateDictStore,
    NodeModelStateDictStore,
    SharedMemoryModelStateDictStore,
    remove_published,
)
from tailrace.transport.weights.transfer_sockets import TransferPlace
from tailrace.transport.weights.transfers import TransferReceiver, TransferringModelStateDictStore

REDIS = "redis"
"""The role that is a Redis of the run's own."""
REDIS_ENTRY = "tailrace.run.roles:redis"

ORCHESTRATOR = "orchestrator"
"""Its name as a writer of payloads that came over sockets; a generator's is that of its life."""


class TransportAddresses(msgspec.Struct, frozen=True):
    """Addresses and folders of one run. Travels in the settings of its roles."""

    epoch: str
    events: str
    batches: str
    batch_files: str
    shared_memory: str
    payloads: str
    """Folder for those that shared memory has no room for."""
    redis: str = ""
    """URL of the Redis that events and batches go through; empty where they do not."""
    samples: str = ""
    """URL of the one that samples for an outside trainer go through; empty without one."""
    keys: CurveKeys | None = None
    """Of this run's sockets, where others than its own host may reach them."""
    trainer_life: int = 0
    """How often the trainer was started before; each life has addresses of its own for events and batches."""


@dataclass(frozen=True, slots=True)
class GeneratorEnds:
    """What a generator's process reads and writes beside its socket."""

    open: OpenModelStateDict
    payloads: PayloadStore
    forwarded: MemoryPayloadStore | None
    """The same store, where its client does not see it."""


def restarts_trainer(settings: RunSettings) -> bool:
    """Whether a trainer that ends early is started again: its batches are kept then, until a checkpoint has them."""
    return settings.restarts.per_role > 0


class HostTransports(Transports):
    """Of roles of one host."""

    def __init__(
        self, where: TransportAddresses, settings: RunSettings, address: str = "", weights: WeightsOfNodes | None = None
    ) -> None:
        """`address` is where the run's own process may listen, and `weights` what it brings weights to nodes with."""
        self.where, self._settings, self._own_host = where, settings, _host_of(address)
        self._weights = weights if settings.transport.weights == "object_store" else None
        self.redis = redis_place(where, settings) if where.redis else None
        self.samples = redis_place(where, settings, where.samples) if where.samples else None
        self._open_channel: OpenChannel = (
            partial(Channel, keys=where.keys) if self.redis is None else self.redis.open_channel
        )
        self._shared_memory, self._files = Path(where.shared_memory), Path(where.batch_files)
        self.lender = ModelStateDictLender(
            self._weights_folder(self._own_host), deltas=settings.transport.weights != "whole"
        )
        """Lends published weights to be sent to generators that do not see the folder."""

    @override
    @asynccontextmanager
    async def trainer(self, rank: int = 0, address: str = "") -> AsyncIterator[TrainerEnds]:
        for asked in (self.where.events, rank_address(self.where.batches, rank)):
            require_listener(asked)
        log = self._log_client(rank)
        batches = self._batch_receiver(rank)
        payloads = self._payload_store()
        try:
            with self._published(rank, address) as store:
                yield TrainerEnds(log, batches, store, payloads)
        finally:
            await batches.close()
            payloads.close()
            await log.close()

    @override
    async def serve_generator(self, role: Role, make_generator: MakeGenerator) -> None:
        with self.generator_ends(role.instance, role.address) as ends:
            generator = make_generator(ends.payloads)
            try:
                server = GeneratorServer(
                    generator,
                    ends.open,
                    role.address,
                    report_every_s=self._settings.generator.router.report_every_s,
                    forwarded=ends.forwarded,
                    keys=self.where.keys,
                )
                role.ready(server.address)
                await server.serve()
            finally:
                await generator.close()

    @contextmanager
    def generator_ends(self, instance: str, address: str = "") -> Iterator[GeneratorEnds]:
        """Of a generator that puts payloads under this name. `address` is where its role may listen."""
        forwarded = MemoryPayloadStore() if self._settings.transport.payloads == "value" else None
        with closing(self._opened(address)) as store, closing(forwarded or self._payload_store(instance)) as payloads:
            yield GeneratorEnds(store.open, payloads, forwarded)

    @property
    def _transfers_weights(self) -> bool:
        return self._settings.transport.weights == "nccl"

    @contextmanager
    def _published(self, rank: int, address: str) -> Iterator[ModelStateDictStore]:
        """Where the trainer publishes."""
        with ExitStack() as stack:
            life = self.where.trainer_life
            store: ModelStateDictStore = SharedMemoryModelStateDictStore(self._shared_memory, life)
            if self._transfers_weights and rank == 0:
                place = self._transfer_place(address)
                store = TransferringModelStateDictStore(place, transfer_call_s(self._settings))
            elif self._brings_weights and rank == 0:
                folder = NodeFolder(self.where.epoch, _host_of(address))
                stack.callback(folder.leave)
                store = NodeModelStateDictStore(folder.path, _host_of(address), life)
            stack.callback(store.close)
            yield store

    def _opened(self, address: str) -> SharedMemoryModelStateDictStore | TransferReceiver:
        """Where generators open what is published."""
        if self._transfers_weights:
            return TransferReceiver(self._transfer_place())
        return SharedMemoryModelStateDictStore(self._weights_folder(_host_of(address)))

    @property
    def _brings_weights(self) -> bool:
        return self._settings.transport.weights == "object_store"

    def _weights_folder(self, host: str) -> Path:
        """Where processes on this node find what is published."""
        return node_memory(self.where.epoch, host) if self._brings_weights else self._shared_memory

    def bringing(self, host: str = "") -> BringWeights | None:
        """Brings weights to this node, by default to this process's; None where they need not be brought.

        It raises `TransportError` where they do not come in time: this way shows no progress meanwhile, a socket does.
        """
        if (weights := self._weights) is None:
            return None
        node, deadline_s = host or self._own_host, self._settings.generator.router.starved_deadline_s

        async def bring(ref: ModelStateDictRef) -> ModelStateDictRef:
            try:
                async with timeout(deadline_s):
                    return await weights.bring(ref, node)
            except TimeoutError:
                raise TransportError(
                    f"weights of version {ref.version} did not come to the node {node} within {deadline_s:g} s "
                    "(generator.router.starved_deadline_s)"
                ) from None

        return bring

    @property
    def lending(self) -> LendingFigures:
        """Of weights that were sent to where the trainer's memory is not seen."""
        own = self.lender.figures
        return own if self._weights is None else own.plus(self._weights.figures)

    def _transfer_place(self, address: str = "") -> TransferPlace:
        """`address` is where the trainer's role may listen: its host is its node's where roles are on several."""
        if self.where.keys is None:
            return TransferPlace(self._shared_memory, life=self.where.trainer_life)
        return TransferPlace(self._shared_memory, _host_of(address), self.where.keys.derived("weight transfers"))

    @property
    def _batch_bodies(self) -> Literal["memory", "files", "messages"]:
        """Where the bytes of batches lie: as chosen; they are messages themselves where roles share no memory."""
        if self.redis is not None:
            return "files" if self._settings.transport.redis.bodies == "files" else "messages"
        match self._settings.transport.batches or ("zmq" if self.where.keys else None):
            case "files":
                return "files"
            case "zmq":
                return "messages"
            case _:
                return "memory"

    @override
    def batch_sender(self) -> ChannelBatchSender:
        open_channel = self._open_channel
        match self._batch_bodies:
            case "memory":
                store: BatchStore = SharedMemoryStore(self._shared_memory, spill=self._files)
            case "files":
                store = FileStore(self._files)
            case "messages":
                store = ValueStore()
                if self.redis is not None:
                    open_channel = self.redis.open_keeping_channel
        return ChannelBatchSender(
            self.where.batches,
            store,
            num_ranks=self._settings.trainer.ranks,
            ranks_per_row=self._settings.trainer.sequence_parallel,
            capacity=BATCHES_AHEAD,
            retained_bytes=self._retained_bytes,
            open_channel=open_channel,
        )

    def _batch_receiver(self, rank: int) -> ChannelBatchReceiver:
        match self._batch_bodies:
            case "memory":
                source: BatchSource = FileSource(self._shared_memory, recycled=True, spill=self._files)
            case "files":
                source = FileSource(self._files)
            case "messages":
                source = ValueSource()
        return ChannelBatchReceiver(
            self.where.batches,
            source,
            rank=rank,
            num_ranks=self._settings.trainer.ranks,
            ranks_per_row=self._settings.trainer.sequence_parallel,
            open_channel=self._open_channel,
        )

    async def end_trainer_life(self, launcher: Launcher, batches: ChannelBatchSender) -> None:
        """New addresses for the next life of the trainer, at which `batches` waits for it."""
        life = self.where.trainer_life + 1
        address = launcher.address if self.redis is None else self.redis.address
        events, new = (address(f"{name}.{life}") for name in ("events", "batches"))
        self.where = msgspec.structs.replace(self.where, events=events, batches=new, trainer_life=life)
        await batches.reconnect(new)

    def forget_weights(self, before_life: int) -> None:
        """Remove what earlier lives of the trainer published. What is open stays readable."""
        remove_published(self._shared_memory, before_life)

    @property
    def _retained_bytes(self) -> int | None:
        """Of batches that a trainer would train again, and of their payloads; None where none is started again.

        In shared memory, which weights and payloads need too, a quarter of what is free at most. In Redis a quarter of
        what it takes: it holds them twice while a trainer is started again, and refuses all messages once it is full.
        """
        if not restarts_trainer(self._settings):
            return None
        chosen = int(self._settings.restarts.retained_mb * 1e6)
        if self._batch_bodies == "memory":
            return min(chosen, shutil.disk_usage(self._shared_memory).free // 4)
        if self._batch_bodies == "files" or self.redis is None or self.redis.max_bytes is None:
            return chosen
        return min(chosen, self.redis.max_bytes // 4)

    @override
    def sample_sender(self) -> SampleSender:
        assert self.samples is not None
        return RedisSampleSender(self.samples)

    @override
    def model_state_dicts(self) -> SharedMemoryModelStateDictStore:
        return SharedMemoryModelStateDictStore(self._shared_memory)

    @override
    def payload_accounts(self) -> PayloadAccounts:
        return PayloadAccounts(self._payload_store(ORCHESTRATOR))

    def _payload_store(self, writer: str = "") -> PayloadStore:
        """Shared memory until it is full, or the folder that the settings name. Puts as `writer`."""
        in_folder = SlabPayloadStore(Path(self.where.payloads), writer=writer, name=FOLDER)
        if self._settings.transport.payload_folder is not None:
            return in_folder
        return OverflowingPayloadStore(SlabPayloadStore(self._shared_memory, writer=writer), in_folder)

    @override
    def serve_log(self, log: MemoryEventLog) -> Callable[[], Awaitable[None]]:
        if self.redis is None:
            return EventLogServer(log, self.where.events, self.where.keys).close
        addresses = [rank_address(self.where.events, rank) for rank in range(self._settings.trainer.ranks)]
        return ConversingEventLogServer(log, addresses, self.redis.open_channel).close

    def _log_client(self, rank: int) -> EventLogClient:
        address = self.where.events if self.redis is None else rank_address(self.where.events, rank)
        return EventLogClient(address, self.where.epoch, self._open_channel)

    @override
    def connect(
        self, address: str, name: str, on_report: ReportListener, payloads: PayloadAccounts | None
    ) -> GeneratorClient:
        return GeneratorClient(
            address,
            name=name,
            keys=self.where.keys,
            progress_deadline_s=self._settings.generator.router.progress_deadline_s,
            on_report=on_report,
            bring=self.bringing(_host_of(address)),
            payloads=payloads,
            by_value=self._settings.transport.payloads == "value",
        )

    async def serve_agent_worker(self, role: Role, place: LocalPlace) -> None:
        """Say that the role is ready, and start an agent worker's processes there until the orchestrator is gone."""
        keys = self.where.keys
        end_guard = guard_all(zmq.asyncio.Context.instance(), keys) if keys else None
        try:
            host = WorkerHost(role.address, keys, place)
            role.ready(host.address)
            await host.serve()
        finally:
            if end_guard is not None:
                end_guard()

    def agent_host(self, address: str, name: str) -> HostClient:
        """To a role of that kind that is ready at `address`."""
        return HostClient(address, self.where.keys, name)

    @override
    def remove(self) -> None:
        for folder in {self.where.shared_memory, self.where.payloads}:
            shutil.rmtree(folder, ignore_errors=True)


def _host_of(address: str) -> str:
    """Of an endpoint over TCP; else empty."""
    return urlsplit(address).hostname or ""


def transfer_call_s(settings: RunSettings) -> float:
    """How long a generator may take for one call of a weight transfer.

    All that are sent weights at that time wait for one that hangs, and none of them may count as stuck before it is
    given up.
    """
    return settings.generator.router.progress_deadline_s / 2


def redis_place(where: TransportAddresses, settings: RunSettings, url: str = "") -> RedisPlace:
    """Where one start of a run keeps its streams."""
    chosen = settings.transport.redis
    return RedisPlace(url or where.redis, Origin(settings.name, where.epoch), chosen.outage_s, chosen.prefix)


@asynccontextmanager
async def host_transports(settings: RunSettings, paths: RunPaths, launcher: Launcher) -> AsyncIterator[HostTransports]:
    """With fresh folders, which are removed at the end; before and after it those of dead runs and roles are."""
    await asyncio.to_thread(remove_leftovers)
    redis = await _redis_url(settings, launcher) if settings.uses_redis else ""
    samples = await _redis_url(settings, launcher) if settings.feeds_through_redis else ""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, remove_leftovers)
        if launcher.has_roles_elsewhere:  # which sees the run's folder alone
            await asyncio.to_thread(remove_leftovers, paths.root)
            shared_memory = payloads = stack.enter_context(own_payload_folder(launcher.epoch, paths.root)).path
        else:
            shared_memory = payloads = stack.enter_context(own_shared_memory(launcher.epoch)).path
        if settings.generator.return_routed_experts:
            parent = Path(settings.transport.payload_folder or paths.root)
            await asyncio.to_thread(remove_leftovers, parent)
            payloads = stack.enter_context(own_payload_folder(launcher.epoch, parent)).path
        where = TransportAddresses(
            epoch=launcher.epoch,
            events=launcher.address("events"),
            batches=launcher.address("batches"),
            batch_files=str(paths.batches),
            shared_memory=str(shared_memory),
            payloads=str(payloads),
            redis=redis,
            samples=samples,
            keys=CurveKeys.make() if launcher.finds_devices else None,
        )
        if where.keys:
            stack.callback(guard_all(zmq.asyncio.Context.instance(), where.keys))
        if redis:
            place = redis_place(where, settings)
            where = msgspec.structs.replace(where, events=place.address("events"), batches=place.address("batches"))
        transports = HostTransports(where, settings, launcher.address(ORCHESTRATOR), launcher.weights)
        stack.callback(transports.lender.close)
        if transports.redis is not None:
            transports.redis.max_bytes = await asyncio.to_thread(memory_bound, redis)
        launcher.redis = transports.redis
        streams = transports.redis or transports.samples
        if streams is not None and not settings.transport.redis.start:  # nobody else knows one of the run's own
            await stack.enter_async_context(own_run_name(streams, str(Owner.of_this_process())))
            await asyncio.to_thread(streams.remove_keys)
        if samples:
            chosen, sockets = settings.transport, str(shared_memory) if settings.transport.weights == "nccl" else ""
            url, call_s = chosen.redis.url or samples, transfer_call_s(settings)
            feed_place = FeedPlace(url, settings.name, chosen.redis.prefix, sockets, call_s)
            with writing(paths.root):
                stack.enter_context(announcement_file(paths.feed, msgspec.json.encode(feed_place)))
        yield transports


async def _redis_url(settings: RunSettings, launcher: Launcher) -> str:
    """Of one that is there, or was started. Raises `SettingsError`, `LifecycleError`."""
    if settings.transport.redis.start:
        return await launcher.start(RoleSpec(REDIS, REDIS_ENTRY, bytes(launcher.logs))).ready()
    assert settings.transport.redis.url is not None
    url = with_password(settings.transport.redis.url)
    await asyncio.to_thread(require_redis, url)
    return url
