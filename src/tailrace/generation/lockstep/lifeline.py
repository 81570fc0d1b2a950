"""How ranks of one engine learn at once that another one died, idle or not.

Between rank 0 and every other rank each side waits, in a thread of its own, for a word that the other sends before it
leaves in order. When a rank dies the kernel closes its connection and the wait fails: no heartbeat, no polling. The
exchange of orders is not enough: there is none while idle, and within a step the engine's own kernels may block.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from tailrace.errors import EngineFailed
from tailrace.generation.lockstep.ranks import RankGroup, join_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from tailrace.generation.engines.protocol import FailureListener

_PARTING_S = 5.0
"""How long leaving waits for the others' last word."""


class Lifeline:
    """Of one rank, to rank 0; of rank 0, to all others. Making it waits until all ranks have."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._group: RankGroup = join_ranks(store, rank, size, "lifeline")
        self._others = range(1, size) if rank == 0 else range(1)
        self._lost: EngineFailed | None = None
        self._on_failure: FailureListener | None = None
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._wait_for, args=(other,), name=f"tailrace-rank-{other}", daemon=True)
            for other in self._others
        ]
        for thread in self._threads:
            thread.start()

    def watch(self, on_failure: FailureListener) -> None:
        """Tell it, from a thread of its own, that a rank died; at once where one did. The last listener stays."""
        with self._lock:
            self._on_failure = on_failure
            lost = self._lost
        if lost is not None:
            on_failure(lost)

    def announce_end(self) -> None:
        """This rank ends, and the others know why, or are leaving, too."""
        word = torch.ones(1, dtype=torch.uint8)
        for other in self._others:
            with contextlib.suppress(RuntimeError):  # it is gone already
                self._group.send([word], other, 0).wait()

    def part(self) -> None:
        """Leave in order: say so, and wait for the others to do the same."""
        self.announce_end()
        for thread in self._threads:
            thread.join(_PARTING_S)

    def _wait_for(self, other: int) -> None:
        try:
            self._group.recv([torch.zeros(1, dtype=torch.uint8)], other, 0).wait()
        except RuntimeError as error:
            lost = EngineFailed(f"rank {other} of the engine died or was ended")
            lost.__cause__ = error
            with self._lock:
                first = self._lost is None
                self._lost = self._lost or lost
                listener = self._on_failure
            if first and listener is not None:
                listener(lost)
