"""The ranks of a trainer: processes that hold a share of the model each, and take every step together.

    rank 0   leads: gets batches, decides, publishes, reports          ── orders ──►  ranks 1, 2, ...: do the same
    all      gather weights and scatter gradients (FSDP), agree on figures and on errors, write checkpoints

Kinds of exchange have their own groups, so that none waits behind another: FSDP's collectives (NCCL between GPUs, else
gloo), those of ranks that share rows, and words (what ranks agree on), with the deadline
`trainer.collective_timeout_s`; checkpoints, with an hour; and orders, for which a rank waits for as long as it takes. A
rank that dies ends all of them at once.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from typing_extensions import override

from tailrace import errors
from tailrace.errors import RankLost, TailraceError, TrainingError
from tailrace.training.rows.row_sharing import RowGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

ValueT = TypeVar("ValueT")

_FOREVER = datetime.timedelta(days=1000)
_WRITING = datetime.timedelta(hours=1)
"""How long a rank may take longer than another to read a checkpoint, to copy what it holds, or to write its part."""
_REPORTS_WITHIN_S = 5.0
"""How long a rank that lost another waits to hear from those that are left."""
_FAILED, _LOST = "failed", "lost"


class Ranks:
    """One process that trains alone: there is nobody to agree with. `JoinedRanks` are several."""

    rank = 0
    size = 1
    data_rank = 0
    """Which rows of a batch are this rank's: those of `data_rank` among `data_size`."""
    data_size = 1
    row_group: RowGroup | None = None
    """Those that share each row; None where every rank has its own."""

    def gather(self, own: ValueT) -> list[ValueT]:
        """Every rank's value, in their order. Numbers, texts and lists of them. Raises `RankLost`."""
        return [own]

    def agree(self, work: Callable[[], ValueT], *, of_checkpoint: bool = False) -> ValueT:
        """Do this rank's part, and go on only if every rank did its own; else all raise the first rank's error.

        `of_checkpoint`: a rank may take as much longer for it than another as to write a checkpoint.
        """
        return work()

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around torch's own collectives: what they raise for a rank that is gone becomes `RankLost`."""
        yield


ALONE: Final = Ranks()


class JoinedRanks(Ranks):
    """This process among several. Make it in each of them; that waits for the others."""

    def __init__(
        self, store: Store, rank: int, size: int, *, device: str, deadline_s: float, ranks_per_row: int = 1
    ) -> None:
        """`store` is where they meet, empty at first; so many neighbours share each row, a divisor of `size`.

        Raises `RankLost` where some do not come in time.
        """
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self.data_rank, self.data_size = rank // ranks_per_row, size // ranks_per_row
        self._store = store
        self._device = torch.device(device)
        deadline = datetime.timedelta(seconds=deadline_s)
        store.set_timeout(deadline)
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        with self.exchanging():
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
            self._orders = dist.new_group(backend="gloo", timeout=_FOREVER)
            self._words = dist.new_group(backend="gloo", timeout=deadline)
            self.checkpoints = dist.new_group(backend="gloo", timeout=max(deadline, _WRITING))
            """Over which ranks copy a checkpoint's weights in step, write it together, in a thread beside training, and
            read one before it.
            """
            if ranks_per_row > 1:
                self.row_group = self._make_row_group(ranks_per_row, deadline)
            self.gather(None)

    def _make_row_group(self, count: int, deadline: datetime.timedelta) -> RowGroup:
        """Of this rank; all ranks make all of them."""
        firsts = range(0, self.size, count)
        groups = [dist.new_group(list(range(first, first + count)), timeout=deadline) for first in firsts]
        return RowGroup(groups[self.data_rank], self.rank % count, count)

    def mesh(self, device_type: str) -> DeviceMesh:
        """All ranks in a row, with their devices or their CPUs."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, (self.size,))

    @override
    def gather(self, own: ValueT) -> list[ValueT]:
        return self._gather(own, self._words)

    def _gather(self, own: ValueT, group: dist.ProcessGroup) -> list[ValueT]:
        data = msgspec.msgpack.encode(own)
        with self.exchanging():
            lengths = [int(length) for length in self._all(torch.tensor([len(data)]), group)]
            padded = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8)
            parts = self._all(padded, group)
        decoded = [
            msgspec.msgpack.decode(part.numpy().tobytes()[:length]) for part, length in zip(parts, lengths, strict=True)
        ]
        return cast("list[ValueT]", decoded)

    @override
    def agree(self, work: Callable[[], ValueT], *, of_checkpoint: bool = False) -> ValueT:
        result: ValueT | None = None
        own: TailraceError | None = None
        try:
            result = work()
        except TailraceError as error:
            if isinstance(error, RankLost):
                raise
            own = error
        report = None if own is None else [type(own).__name__, str(own)]
        reports = self._gather(report, self.checkpoints if of_checkpoint else self._words)
        failed = next((rank for rank, words in enumerate(reports) if words is not None), None)
        if failed is None:
            return cast("ValueT", result)
        if own is not None and reports[self.rank] == reports[failed]:
            raise own
        raise _error_of(failed, *cast("list[str]", reports[failed]))

    @override
    @contextmanager
    def exchanging(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_of_exchange(error):
                raise
            self.tell(error, lost=True)
            line = str(error).splitlines()[0]
            raise RankLost(self._who_is_gone(line.partition("] ")[2] or line)) from error

    def send_order(self, order: bytes) -> None:
        """From rank 0 to all others, who wait in `receive_order`. Raises `RankLost`."""
        with self.exchanging():
            dist.broadcast(torch.tensor([len(order)]), 0, group=self._orders)
            dist.broadcast(torch.frombuffer(bytearray(order), dtype=torch.uint8), 0, group=self._orders)

    def receive_order(self) -> bytes:
        """What rank 0 sends next, however long that takes. Raises `RankLost` when it is gone."""
        with self.exchanging():
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0, group=self._orders)
            order = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(order, 0, group=self._orders)
        return order.numpy().tobytes()

    def tell(self, error: BaseException, *, lost: bool = False) -> None:
        """Leave word of why this rank ends, for those that lose it. `lost`: because another one is gone."""
        words = [_LOST if lost else _FAILED, f"{type(error).__name__}: {error}"]
        with contextlib.suppress(RuntimeError):  # the store's own process may be the one that is gone
            self._store.set(_key(self.rank), msgspec.json.encode(words).decode())

    def has_failed(self, rank: int) -> bool:
        """Whether it left word that it ends for an error of its own."""
        words = self._report_of(rank)
        return words is not None and words[0] == _FAILED

    def _all(self, own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own, group=group)
        return gathered

    def _who_is_gone(self, why: str) -> str:
        """A sentence that names the rank that failed, or those that are silent."""
        reports: dict[int, list[str]] = {}
        deadline_s = time.monotonic() + _REPORTS_WITHIN_S
        while len(reports) < self.size - 1 and time.monotonic() < deadline_s:
            reports |= {rank: words for rank in self._others if (words := self._report_of(rank)) is not None}
            failed = next((rank for rank, words in reports.items() if words[0] == _FAILED), None)
            if failed is not None:
                return f"rank {failed} of the trainer failed: {reports[failed][1]}"
            time.sleep(0.05)
        silent = [rank for rank in self._others if rank not in reports]
        names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}" if silent else "a rank"
        return (
            f"{names} of the trainer died or stopped; its part of an exchange did not come within "
            f"{self.deadline_s:g} s (trainer.collective_timeout_s), or its connection was closed: {why}"
        )

    def _report_of(self, rank: int) -> list[str] | None:
        try:
            if not self._store.check([_key(rank)]):
                return None
            words: list[str] = msgspec.json.decode(self._store.get(_key(rank)))
        except RuntimeError:
            return None
        return words

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


def _key(rank: int) -> str:
    return f"tailrace/end of rank {rank}"


def _error_of(rank: int, kind: str, message: str) -> TailraceError:
    """Another rank's error, as this one raises it."""
    found: Any = getattr(errors, kind, None)
    error = found if isinstance(found, type) and issubclass(found, TrainingError | errors.ModelError) else TrainingError
    raised: TailraceError = error(message if message.startswith("rank ") else f"rank {rank}: {message}")
    return raised


def _is_of_exchange(error: RuntimeError) -> bool:
    """Whether torch raised it because another rank is gone or late. gloo has no class of its own for that."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
