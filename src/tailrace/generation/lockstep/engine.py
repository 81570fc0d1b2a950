"""One engine made of the same program on several ranks: rank 0 decides, all ranks do it and compare their results.

    rank 0: Generator → LockstepEngine ── order: what arrived since the last step, and "step" ──→ rank 1: follow()
                                       ←─ every rank to all: done or not, a digest of its tokens ──→

For engines that split a model over ranks. Orders are msgpack, broadcast over their own gloo group; idle followers wait
in the exchange. A rank that fails sends its error to all; one that dies fails the exchange, and `Lifeline` reports it
at once. Either way every rank ends with `EngineFailed`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
import torch
from typing_extensions import override

from tailrace.errors import EngineFailed, GenerationError, ModelError, RequestRefused
from tailrace.generation.engines.prefetch import prefetch_tensors
from tailrace.generation.engines.protocol import (
    Engine,
    EngineLimits,
    EngineStatistics,
    FailureListener,
    SampledTokens,
)
from tailrace.generation.lockstep.lifeline import Lifeline
from tailrace.generation.lockstep.ranks import RankGroup
from tailrace.records import GenerationRequest
from tailrace.transport.channels import decode_array, encode

_ERROR_BYTES = 2000


def _is_survivable(error: Exception) -> bool:
    """Whether an engine may raise it of an order and go on, if every rank does: bad weights, a refused reset."""
    return isinstance(error, ModelError | GenerationError) and not isinstance(error, EngineFailed | RequestRefused)


class _Add(msgspec.Struct, frozen=True, tag=True):
    request: GenerationRequest


class _Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class _Reseed(msgspec.Struct, frozen=True, tag=True):
    seed: int


_Arrival: TypeAlias = _Add | _Abort | _Reseed


class _Step(msgspec.Struct, frozen=True, tag=True):
    """Preceded by what arrived since the last step, in order."""

    arrivals: list[_Arrival]


class _Load(msgspec.Struct, frozen=True, tag=True):
    """Followed by the tensors themselves, in this order."""

    version: int
    tensors: list[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape."""


class _Reset(msgspec.Struct, frozen=True, tag=True):
    preempt_running: bool


class _Close(msgspec.Struct, frozen=True, tag=True):
    pass


_Order: TypeAlias = _Step | _Load | _Reset | _Close

_ORDERS: msgspec.msgpack.Decoder[_Order] = msgspec.msgpack.Decoder(_Order, dec_hook=decode_array)


@dataclass(slots=True)
class _Ranks:
    """The exchange between ranks. Raises `EngineFailed` when one is gone."""

    group: RankGroup
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    """Where followers receive tensors; kept from load to load."""

    def send(self, order: _Order) -> None:
        """From rank 0 to all others, who are in `receive`."""
        data = torch.frombuffer(bytearray(encode(order)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(data)

    def receive(self) -> _Order:
        """What rank 0 sends next."""
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(data)
        return _ORDERS.decode(data.numpy().tobytes())

    def send_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """After a `_Load`."""
        for tensor in tensors.values():
            self._broadcast_bytes(tensor.detach().cpu().contiguous())

    def receive_tensors(self, load: _Load) -> dict[str, torch.Tensor]:
        """After a `_Load`: the tensors, valid until the next one."""
        received = {}
        for name, dtype, shape in load.tensors:
            tensor = self.staging.get(name)
            if tensor is None or tensor.shape != shape or str(tensor.dtype) != dtype:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            self._broadcast_bytes(tensor)
            received[name] = self.staging[name] = tensor
        return received

    def agree(self, error: Exception | None, digest: int = 0) -> None:
        """Tell all ranks how an order went here, and learn how it went there.

        Raises this rank's own error where an engine may survive it and all ranks have one, and `EngineFailed` with the
        failing rank's where they don't, or where ranks came to different results.
        """
        codes = self._gather(torch.tensor([0 if error is None else 1 + _is_survivable(error), digest]))
        failed = [rank for rank, code in enumerate(codes) if code[0]]
        if not failed:
            if len({int(code[1]) for code in codes}) > 1:
                raise EngineFailed("the engine's ranks, driven alike, did not sample the same tokens")
            return
        text = f"{type(error).__name__}: {error}".encode()[:_ERROR_BYTES] if error is not None else b""
        texts = self._gather(torch.frombuffer(bytearray(text.ljust(_ERROR_BYTES)), dtype=torch.uint8))
        if error is not None and all(int(code[0]) == 2 for code in codes):
            raise error
        why = texts[failed[0]].numpy().tobytes().decode(errors="replace").rstrip()
        raise EngineFailed(f"rank {failed[0]} of the engine failed: {why}") from error

    def _broadcast_bytes(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._broadcast(tensor.reshape(-1).view(torch.uint8))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._exchange(lambda: self.group.broadcast(tensor, 0).wait())

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        all_ranks = [torch.empty_like(own) for _ in range(self.group.size())]
        self._exchange(lambda: self.group.allgather(all_ranks, own).wait())
        return all_ranks

    def _exchange(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            raise EngineFailed(
                f"rank {self.group.rank()} of the engine lost another rank, which died or was ended: "
                f"{str(error).splitlines()[0].partition('. ')[0]}"
            ) from error


class LockstepEngine(Engine):
    """All ranks' engines as one, on rank 0; every other rank runs `follow`."""

    def __init__(
        self,
        engine: Engine,
        group: RankGroup,
        lifeline: Lifeline,
        on_closed: Callable[[], object] = lambda: None,
    ):
        """`engine` is this rank's own, built alike on every rank (the same seed, too), as `reseed` keeps it.

        By the `lifeline` a rank that dies is noticed at once, and not only in the next exchange. `on_closed` is called
        at the end of `close`, when all ranks have closed their engines: their processes may be waited for there.
        """
        self._engine, self._ranks, self._lifeline = engine, _Ranks(group), lifeline
        self._on_closed = on_closed
        self._arrivals: list[_Arrival] = []

    @property
    @override
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    @override
    def has_work(self) -> bool:
        return self._engine.has_work

    @override
    def watch(self, on_failure: FailureListener) -> None:
        self._engine.watch(on_failure)
        self._lifeline.watch(on_failure)

    @override
    def add(self, request: GenerationRequest) -> None:
        """The other ranks are told with the next step."""
        self._engine.add(request)
        self._arrivals.append(_Add(request))

    @override
    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._arrivals.append(_Abort(request_id))

    @override
    def reseed(self, seed: int) -> None:
        self._engine.reseed(seed)
        self._arrivals.append(_Reseed(seed))

    @override
    def step(self) -> list[SampledTokens]:
        """All ranks', and this rank's tokens."""
        arrivals, self._arrivals = self._arrivals, []
        self._ranks.send(_Step(arrivals))
        return _agreed(self._ranks, self._engine.step)

    @override
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Read ahead, so that the copy meets no page that is not there."""
        prefetch_tensors(tensors)
        return tensors

    @override
    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Every rank gets all the tensors and takes what is its own."""
        described = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        self._ranks.send(_Load(version, described))
        self._ranks.send_tensors(tensors)
        _agreed(self._ranks, lambda: self._engine.load_model_state_dict(tensors, version))

    @override
    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        self._ranks.send(_Reset(preempt_running))
        _agreed(self._ranks, lambda: self._engine.reset_prefix_cache(preempt_running=preempt_running))

    @override
    def statistics(self) -> EngineStatistics:
        """This rank's."""
        return self._engine.statistics()

    @override
    def close(self) -> None:
        """End all ranks' engines."""
        self._ranks.send(_Close())
        self._engine.close()
        self._lifeline.part()
        self._on_closed()


def follow(engine: Engine, group: RankGroup, lifeline: Lifeline) -> None:
    """Do what rank 0 does, on every other rank; returns when it closes. Raises `EngineFailed` when any rank fails."""
    try:
        _obey(engine, _Ranks(group))
    except EngineFailed:
        lifeline.announce_end()  # rank 0 has this error, and must not hear first that a rank ended
        raise
    engine.close()
    lifeline.part()


def _obey(engine: Engine, ranks: _Ranks) -> None:
    """Returns when rank 0 closes."""
    while True:
        order = ranks.receive()
        match order:
            case _Step():
                _agreed(ranks, partial(_step, engine, order))
            case _Load():
                tensors = ranks.receive_tensors(order)
                _survive(ranks, partial(engine.load_model_state_dict, tensors, order.version))
            case _Reset(preempt_running=preempt):
                _survive(ranks, partial(engine.reset_prefix_cache, preempt_running=preempt))
            case _Close():
                return


def _survive(ranks: _Ranks, work: Callable[[], None]) -> None:
    """What rank 0 will tell its caller of is no matter of this rank's."""
    try:
        _agreed(ranks, work)
    except (ModelError, GenerationError) as error:
        if not _is_survivable(error):
            raise


def _step(engine: Engine, order: _Step) -> list[SampledTokens]:
    for arrival in order.arrivals:
        match arrival:
            case _Add(request=request):
                engine.add(request)
            case _Abort(request_id=request_id):
                engine.abort(request_id)
            case _Reseed(seed=seed):
                engine.reseed(seed)
    return engine.step()


def _agreed(ranks: _Ranks, work: Callable[[], list[SampledTokens] | None]) -> list[SampledTokens]:
    """Do this rank's part, and go on only if every rank did its own."""
    chunks: list[SampledTokens] = []
    error: Exception | None = None
    try:
        chunks = work() or []
    except Exception as raised:  # noqa: BLE001 - told to all ranks, and raised there and here
        error = raised
    ranks.agree(error, _digest(chunks))
    return chunks


def _digest(chunks: list[SampledTokens]) -> int:
    digest = 0
    for chunk in chunks:
        digest = zlib.crc32(chunk.token_ids.tobytes(), zlib.crc32(chunk.request_id.encode(), digest))
    return digest
