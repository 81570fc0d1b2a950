"""Weights from the trainer's GPU straight into vLLM's workers on other GPUs, by vLLM's weight-transfer interface.

    trainer     publish() keeps what was gathered, on its GPU; a thread for each generator that connects serves it
    generator   open()    ── Open ─► Lent: version, names, types, shapes                        staging thread
                receive() ── Send ─► start_weight_update; update_weights, and the trainer broadcasts;
                                     finish_weight_update ─► Sent                               between two steps

Every generator has a group of its own with the trainer: one that comes late, or dies, concerns no other. Whoever fails
or is gone ends that group, so that no broadcast waits for it. Groups are joined at any time, and weights are sent to
one generator after the other: all broadcasts share vLLM's streams on the trainer's GPU, and no call's deadline counts
while another broadcast runs. What is connected are `transfer_sockets`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from typing_extensions import override

from tailrace.errors import TransportError
from tailrace.free_ports import free_port
from tailrace.guards import guarded
from tailrace.records import ModelStateDictRef
from tailrace.transport.weights.stores import ModelStateDict, ModelStateDictStore
from tailrace.transport.weights.transfer_sockets import TransferListener, TransferPlace, as_transport_error, connect

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, TrainerWeightTransferEngine

_log = logging.getLogger(__name__)

MakeInitInfo: TypeAlias = "Callable[[str, int], TrainerInitInfo]"
"""What vLLM's trainer side is made of, for a group of so many processes that meets at this host, the trainer's. Its
`backend` is the engine's."""
Answer: TypeAlias = Callable[[str, "dict[str, Any] | None"], None]
"""Calls a method of vLLM's weight transfer on all workers of an engine, with its argument where it has one."""

_BUFFER_BYTES = 128 * 1024**2
"""Of one packed message, of which two are on their way: vLLM's own default would take 2 GB of each GPU."""
_CALLS = frozenset({"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"})


class _Open(msgspec.Struct, frozen=True, tag=True):
    version: int


class _Lent(msgspec.Struct, frozen=True, tag=True):
    version: int
    tensors: list[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape."""


class _Send(msgspec.Struct, frozen=True, tag=True):
    workers: int


class _Call(msgspec.Struct, frozen=True, tag=True):
    method: str
    argument: dict[str, Any] | None


class _Done(msgspec.Struct, frozen=True, tag=True):
    """Of a call, or of all that was sent."""

    error: str = ""


_Message: TypeAlias = _Open | _Lent | _Send | _Call | _Done
_MESSAGES: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)


def nccl_init_info(host: str, world_size: int) -> TrainerInitInfo:
    """Of vLLM's NCCL backend, at a port of its own."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(host, free_port(host), world_size, rank=0, packed_buffer_size_bytes=_BUFFER_BYTES)


class TransferringModelStateDictStore(ModelStateDictStore):
    """The trainer's end, of rank 0. Generators open what it publishes with a `TransferReceiver`."""

    keeps_tensors = True

    def __init__(self, place: TransferPlace, deadline_s: float, make_init_info: MakeInitInfo = nccl_init_info) -> None:
        """`deadline_s` is how long a generator may take for one call. Raises `TransportError`."""
        self._deadline_s, self._make_init_info = deadline_s, make_init_info
        self._host = place.host or "127.0.0.1"
        self._listener = TransferListener(place)
        self._newest: ModelStateDict | None = None
        self._sending = threading.Lock()
        threading.Thread(target=self._accept, name="weight transfers", daemon=True).start()

    @override
    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> ModelStateDictRef:
        """Keep the tensors themselves until newer ones come and no generator receives them any more."""
        self._newest = ModelStateDict(tensors, version)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return ModelStateDictRef(version=version, uri=self._listener.uri, num_bytes=num_bytes)

    @override
    def open(self, ref: ModelStateDictRef) -> Any:
        raise TransportError(f"{ref.uri} is opened by a generator, which is sent its weights")

    @override
    def close(self) -> None:
        self._listener.close()
        self._newest = None

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            threading.Thread(target=self._serve, args=(connection,), name="weight transfer", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """One generator, until it leaves or fails."""
        generator = _Generator(connection, self._deadline_s, self._sending)
        try:
            self._listener.admit(connection)
            while True:
                match _receive(connection):
                    case _Open(version=version):
                        generator.lend(self._newest, version)
                    case _Send(workers=workers):
                        generator.send(workers, partial(self._make_init_info, self._host))
                    case other:
                        raise _out_of_turn(other)
        except TransportError as error:
            _log.debug("a generator that weights were offered to is gone: %s", error)
        finally:
            generator.end()
            connection.close()


class _Generator:
    """The trainer's side of one generator: vLLM's `WeightSource` and `VLLMWeightSyncClient` at once."""

    def __init__(self, connection: Connection, deadline_s: float, sending: threading.Lock) -> None:
        """Generators that share a lock, `sending`, are sent their weights one after the other."""
        self._connection, self._deadline_s, self._sending = connection, deadline_s, sending
        self._lent: ModelStateDict | None = None
        self._engine: TrainerWeightTransferEngine | None = None

    def lend(self, newest: ModelStateDict | None, version: int) -> None:
        """Offer the newest weights, which are kept for this generator until it was sent them, or asks again."""
        if newest is None or newest.version < version:
            raise TransportError(f"no model state dict of version {version} is offered")
        self._lent = newest
        tensors = [(meta.name, str(meta.dtype), meta.shape) for meta in self.metadata()]
        _send(self._connection, _Lent(newest.version, tensors))

    def send(self, workers: int, make_init_info: Callable[[int], TrainerInitInfo]) -> None:
        """Send what was lent, to so many workers. Raises `TransportError` once the generator was told of a failure."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        try:
            _use_device_of(self._lent or {})
            if self._engine is None:
                info = make_init_info(1 + workers)
                self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)
            with self._sending:
                self._engine.send_weights()
        except Exception as error:
            with suppress(TransportError):  # it has left where the failure was its own
                _send(self._connection, _Done(f"{type(error).__name__}: {error}"))
            raise TransportError(f"weights could not be sent: {error}") from error
        finally:
            self._lent = None
        _send(self._connection, _Done())

    def end(self) -> None:
        """Leave the group, which ends a broadcast that waits. In any thread; twice does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def metadata(self) -> list[ParamMeta]:
        """Of all that is iterated, in the same order."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter((self._lent or {}).items())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        try:
            _send(self._connection, _Call(method, argument))
            done = _receive(self._connection, self._deadline_s)
            if not isinstance(done, _Done):
                raise _out_of_turn(done)
            if done.error:
                raise TransportError(f"vLLM's {method}: {done.error}")
        except TransportError:
            self.end()  # else a broadcast that runs beside this waits for ever
            self._lent = None  # one that is yet to join its group has nothing to end, and may wait for long
            raise


class OfferedModelStateDict(ModelStateDict):
    """What will be received: tensors without memory, which tell names, types and shapes."""

    def __init__(self, lent: _Lent, connection: Connection) -> None:
        import torch

        empty = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, dtype, shape in lent.tensors
        }
        super().__init__(empty, lent.version)
        self._connection = connection

    def receive(self, workers: int, answer: Answer) -> None:
        """Let the trainer drive `workers` of vLLM through `answer` until they hold these weights. Blocks.

        Raises `TransportError` for whatever fails, on either side.
        """
        _send(self._connection, _Send(workers))
        while isinstance(call := _receive(self._connection), _Call):
            if call.method not in _CALLS:
                raise TransportError(f"{call.method[:40]!r} is no call of a weight transfer")
            try:
                answer(call.method, call.argument)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                with suppress(TransportError):
                    _send(self._connection, _Done(why))
                raise TransportError(f"vLLM's {call.method}: {why}") from error  # the trainer may not come to tell it
            _send(self._connection, _Done())
        if not isinstance(call, _Done):
            raise _out_of_turn(call)
        if call.error:
            raise TransportError(call.error)


class TransferReceiver:
    """A generator's end. One model state dict at a time; safe in one thread after the other."""

    def __init__(self, place: TransferPlace) -> None:
        self._place = place
        self._connections: dict[str, Connection] = {}

    @contextmanager
    def open(self, ref: ModelStateDictRef) -> Iterator[OfferedModelStateDict]:
        """As `ModelStateDictStore.open`, of weights that are yet to be received."""
        try:
            connection = self._connected(ref.uri)
            _send(connection, _Open(ref.version))
            lent = _receive(connection)
            if not isinstance(lent, _Lent):
                raise _out_of_turn(lent)
            yield OfferedModelStateDict(lent, connection)
        except TransportError:
            self.close()
            raise

    def close(self) -> None:
        """Leave. Closing twice does nothing."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _connected(self, uri: str) -> Connection:
        if uri not in self._connections:
            self.close()  # an earlier life of the trainer's
            self._connections[uri] = connect(self._place, uri)
        return self._connections[uri]


def _use_device_of(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make a GPU that tensors are on this thread's own."""
    import torch

    device = next((tensor.device for tensor in tensors.values()), None)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def _send(connection: Connection, message: _Message) -> None:
    with as_transport_error("the other end of a weight transfer is gone"):
        connection.send_bytes(msgspec.msgpack.encode(message))


def _receive(connection: Connection, deadline_s: float | None = None) -> _Message:
    """The next message. Raises `TransportError`, past the deadline, too."""
    with as_transport_error("the other end of a weight transfer is gone"):
        if not connection.poll(deadline_s):
            raise TransportError(
                f"a generator took more than {deadline_s:g} s, half of generator.router.progress_deadline_s, for a "
                "call of a weight transfer"
            )
        received = connection.recv_bytes()
    with guarded("a weight transfer's message cannot be read", TransportError):
        return _MESSAGES.decode(received)


def _out_of_turn(message: _Message) -> TransportError:
    return TransportError(f"an end of a weight transfer said {type(message).__name__} out of turn")
