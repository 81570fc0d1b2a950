"""The gloo group that ranks of one engine talk over, apart from the engine's own."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


class Work(Protocol):
    """An exchange that was begun."""

    def wait(self) -> object:
        """Until it is done. Raises `RuntimeError` when another rank is gone."""


class RankGroup(Protocol):
    """What is used of a process group of torch, whose own types leave it out."""

    def rank(self) -> int:
        """This rank's number."""

    def size(self) -> int:
        """How many ranks there are."""

    def broadcast(self, tensor: torch.Tensor, root: int, /) -> Work:
        """Fill every rank's tensor with that of `root`."""

    def allgather(self, tensors: list[torch.Tensor], own: torch.Tensor, /) -> Work:
        """Fill every rank's list with all ranks' tensors."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """To one rank."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """From one rank."""


def join_ranks(store: Store, rank: int, size: int, name: str = "orders") -> RankGroup:
    """The group over which `size` ranks exchange orders; waits until all have joined.

    Not the default group, which belongs to the engine. Exchanges wait for years: an idle follower is no failure.
    """
    forever = datetime.timedelta(days=1000)
    own = dist.PrefixStore(f"tailrace/{name}", store)  # type: ignore[attr-defined]
    return cast("RankGroup", dist.ProcessGroupGloo(own, rank, size, forever))
