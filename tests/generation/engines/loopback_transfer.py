"""A backend of vLLM's weight transfer that needs no GPU: tensors go through a store of torch's, for both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tailrace.free_ports import free_port

BACKEND = "loopback"
BROKEN = "a.weight.that.breaks.vllm"


@dataclass
class LoopbackInit(WeightTransferInitInfo):  # type: ignore[misc]
    host: str
    port: int
    world_size: int


@dataclass
class LoopbackUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class LoopbackTrainerInit(TrainerInitInfo):  # type: ignore[misc]
    backend: ClassVar[str] = BACKEND
    host: str
    port: int
    world_size: int


class LoopbackEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's side."""

    init_info_cls = LoopbackInit
    update_info_cls = LoopbackUpdate

    def init_transfer_engine(self, init_info: LoopbackInit) -> None:
        self.store = TCPStore(init_info.host, init_info.port, is_master=False)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # there is no device to synchronize

    def receive_weights(self, update_info: LoopbackUpdate) -> None:
        self.model.load_weights(self._received(update_info))

    def _received(self, update_info: LoopbackUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            data = bytearray(self.store.get(name))
            yield name, torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)

    def shutdown(self) -> None:
        pass


@dataclass
class JoiningTrainerInit(LoopbackTrainerInit):
    backend: ClassVar[str] = "joining"


class LoopbackTrainer(TrainerWeightTransferEngine[LoopbackTrainerInit]):  # type: ignore[misc]
    """The trainer's side."""

    init_info_cls = LoopbackTrainerInit
    groups: ClassVar[list[LoopbackTrainer]] = []
    """All that were ever made."""
    ended = False

    @classmethod
    def trainer_init(
        cls, init_info: LoopbackTrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        group = cls(client=client, source=source)
        group.world_size = init_info.world_size
        group.store = TCPStore(init_info.host, init_info.port, is_master=True, wait_for_workers=False)
        client.init_weight_transfer_engine(asdict(LoopbackInit(init_info.host, init_info.port, init_info.world_size)))
        cls.groups.append(group)
        return group

    def send_weights(self) -> None:
        meta = self.source.metadata()
        for name, tensor in self.source:
            self.store.set(name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        names, types, shapes = zip(*((each.name, str(each.dtype)[6:], [*each.shape]) for each in meta), strict=True)
        self.client.start_weight_update()
        self.client.update_weights(asdict(LoopbackUpdate([*names], [*types], [*shapes])))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.ended = True


class JoiningTrainer(LoopbackTrainer):
    """One that joins its group while workers are told to, as NCCL's does, and waits for them even where that failed."""

    init_info_cls = JoiningTrainerInit
    joined = threading.Event()

    @classmethod
    def trainer_init(
        cls, init_info: LoopbackTrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        with ThreadPoolExecutor(1) as beside:
            told = beside.submit(client.init_weight_transfer_engine, {})
            cls.joined.wait()
            told.result()
        return cls(client=client, source=source)


def joining_init_info(host: str, world_size: int) -> JoiningTrainerInit:
    return JoiningTrainerInit(host, 0, world_size, rank=0)


def init_info(host: str, world_size: int) -> LoopbackTrainerInit:
    """Of a group at a free port."""
    return LoopbackTrainerInit(host, free_port(host), world_size, rank=0)


def register() -> None:
    """Make both sides known to vLLM, once in a process."""
    factories: list[tuple[Any, str, Callable[..., object]]] = [
        (WeightTransferEngineFactory, BACKEND, LoopbackEngine),
        (WeightTransferTrainerFactory, BACKEND, LoopbackTrainer),
        (WeightTransferTrainerFactory, JoiningTrainerInit.backend, JoiningTrainer),
    ]
    for factory, backend, side in factories:
        if backend not in factory._registry:
            factory.register_engine(backend, side)
