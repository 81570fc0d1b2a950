"""Which experts every forwarded token was routed to: read off the routers, kept per slot, returned with a request.

routers ──tap──→ step [num_tokens, layers, top_k], on the device ──→ store [slots, room, layers, top_k], on the host
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailrace.errors import GenerationError, ModelError
from tailrace.generation.engines.torch.slots import Placement
from tailrace.models.routers import Router, as_routing, find_routers, index_dtype
from tailrace.records import ExpertArray

_FIRST_TOKENS = 128
_GROWTH = 1.25


def require_routers(model: nn.Module) -> list[Router]:
    """The routers whose experts can be noted; the model may be without memory.

    Raises `ModelError` where there is none, or they differ in how many experts they choose.
    """
    routers = find_routers(model)
    if not routers:
        raise ModelError(
            f"generator.return_routed_experts: {type(model).__name__} has no routers, or none that answer as those "
            "of transformers' mixture-of-experts families do; leave it off"
        )
    if len({router.top_k for router in routers}) > 1:
        raise ModelError(f"generator.return_routed_experts: layers of {type(model).__name__} differ in their top-k")
    return routers


class RouterTap:
    """Notes what the routers of a model answer during one forward pass.

    Raises `ModelError` as `require_routers` does.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        routers = require_routers(model)
        top_k = routers[0].top_k
        self.dtype = np.dtype(index_dtype(max(router.num_experts for router in routers), top_k))
        self.shape = (len(routers), top_k)
        self._device = device
        self._step: Tensor | None = None
        self._asked = 0
        for index, router in enumerate(routers):
            router.module.register_forward_hook(partial(self._note, index))

    def begin(self, num_tokens: int) -> None:
        """A forward pass over so many tokens comes."""
        dtype = torch.uint8 if self.dtype == np.uint8 else torch.uint16
        self._step, self._asked = torch.empty((num_tokens, *self.shape), dtype=dtype, device=self._device), 0

    def take(self) -> ExpertArray:
        """[num_tokens, layers, top_k] of the pass since `begin`; on a GPU this waits for it.

        Raises `GenerationError` where the pass went round a router.
        """
        assert self._step is not None
        step, self._step = self._step, None
        if self._asked != self.shape[0]:
            raise GenerationError(f"{self._asked} of {self.shape[0]} routers were asked in a forward pass")
        taken: ExpertArray = step.cpu().numpy()
        return taken

    def _note(self, index: int, module: nn.Module, inputs: object, answer: object) -> None:
        routing = as_routing(answer)
        if self._step is not None and routing is not None:
            self._step[:, index] = routing.experts
            self._asked += 1


class ExpertStore:
    """What the tap noted, by slot and position. Pure NumPy; rows change places by exchanging their numbers.

    A position keeps what was noted first, also where its keys and values are computed again: that is what sampling saw.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[np.generic], *, slots: int, capacity: int) -> None:
        self._capacity = capacity
        self._entries: ExpertArray = np.empty((slots, min(capacity, _FIRST_TOKENS), *shape), dtype)
        self._place = np.arange(slots)
        self._noted = np.zeros(slots, np.int64)
        """Positions of the row that are there."""
        self._reported = np.zeros(slots, np.int64)
        """Positions of the row that its session was handed, by requests that ended or go on in the next one."""
        self._interrupted = np.zeros(slots, np.int64)
        """The same, by requests that were aborted too."""
        self._first = np.zeros(slots, np.int64)
        """First position that the row's request hands out."""

    def occupy(self, placement: Placement, *, continues: bool) -> None:
        """Give the row to a request, with what is there already.

        What an earlier request of the session was handed is not handed out again, unless its tokens were rewritten, or
        it was aborted and this one does not continue it.
        """
        row, kept, handed = placement.row, placement.kept_tokens, 0
        if placement.donor is not None:
            kept, place, other = placement.copied_tokens, self._place[row], self._place[placement.donor]
            self._entries[place, :kept] = self._entries[other, :kept]
        else:
            handed = int((self._interrupted if continues else self._reported)[row])
        self._first[row] = handed if handed <= kept else 0
        self._noted[row] = kept
        self._reported[row] = self._interrupted[row] = self._first[row]

    def exchange(self, first: int, second: int) -> None:
        """Two rows change places."""
        pair, reverse = [first, second], [second, first]
        for column in (self._place, self._noted, self._reported, self._interrupted, self._first):
            column[pair] = column[reverse]

    def note(self, step: ExpertArray, shares: Sequence[tuple[int, int, int]], positions: NDArray[np.int64]) -> None:
        """What a step routed: `step` holds the tokens of `shares` (row, start, end), then one of each of the first
        rows, which stand at `positions`.
        """
        count = len(positions)
        self._reserve(max([*(end for _, _, end in shares), int(positions.max()) + 1 if count else 0]))
        begin = 0
        for row, first, end in shares:
            start = max(first, int(self._noted[row]))
            if start < end:
                self._entries[self._place[row], start:end] = step[begin + start - first : begin + end - first]
                self._noted[row] = end
            begin += end - first
        if count:
            self._entries[self._place[:count], positions] = step[len(step) - count :]
            self._noted[:count] = np.maximum(self._noted[:count], positions + 1)

    def report(self, row: int, *, aborted: bool) -> tuple[ExpertArray | None, int]:
        """What the row's request hands out, and the position of its first entry."""
        start, end = int(self._first[row]), int(self._noted[row])
        self._interrupted[row] = end
        if not aborted:
            self._reported[row] = end
        if start >= end:
            return None, 0
        return self._entries[self._place[row], start:end].copy(), start

    def _reserve(self, num_tokens: int) -> None:
        room = self._entries.shape[1]
        if num_tokens > room:
            wider = min(self._capacity, max(num_tokens, int(_GROWTH * room)))
            grown = np.empty((len(self._entries), wider, *self._entries.shape[2:]), self._entries.dtype)
            grown[:, :room] = self._entries
            self._entries = grown
