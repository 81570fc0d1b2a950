"""AdamW whose moments lie in the host's memory between steps, and cross to the device a block at a time.

    arriving   moments of block k + 1     pinned memory ── side stream ──► device
    at work    block k: weights, gradients, which are there, and moments ─► AdamW
    leaving    moments of block k - 1     device ── side stream ──► pinned memory

AdamW takes every number by itself, so that a block may be any numbers: parts of weights, as many as fit. Three of them
lie on the device, only while the step runs, which is when no activations do. A step moves 8 bytes of each weight in
each direction, side by side. (Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840, keeps moments on the host as well, and
updates there; with weights and gradients on the device anyway a GPU is done sooner than a CPU would be.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from typing_extensions import override

from tailrace.training.model.sharding import own_share

BLOCK_NUMBERS: Final = 1 << 23
"""Of a weight that a block holds at most: 64 MB of moments, which take much longer to cross than to be asked for."""
STAGED_BYTES: Final = 3 * 2 * 4 * BLOCK_NUMBERS
"""On the device, while a step runs."""
_BLOCKS_AT_ONCE = 3
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """As torch's own, to the bit, but for where the moments are: `state` has this rank's share of them, on the host."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        block_numbers: int = BLOCK_NUMBERS,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._block_numbers = block_numbers

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Returns when the moments are on the host again."""
        assert closure is None
        work = [(group, block) for group in self.param_groups for block in self._blocks(group)]
        if work:  # a rank may have no share of any
            self._update(work)
        updated = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        for weight in updated:
            self.state[weight]["step"] += 1

    def _update(self, work: Sequence[tuple[dict[str, Any], list[_Part]]]) -> None:
        """Blocks, each with its group, one after the other."""
        lanes = _Lanes(work[0][1][0].numbers, self._block_numbers)
        lanes.bring(0, work[0][1])
        for number, (group, block) in enumerate(work):
            if number + 1 < len(work):
                lanes.bring(number + 1, work[number + 1][1])
            _update(group, block, lanes.arrived(number, block))
            lanes.send_back(number, block)
        lanes.close()

    def _blocks(self, group: dict[str, Any]) -> Iterator[list[_Part]]:
        """Of a group's weights that have gradients."""
        block, room = list[_Part](), self._block_numbers
        for part in self._parts(group):
            if len(part.numbers) > room:
                yield block
                block, room = [], self._block_numbers
            block.append(part)
            room -= len(part.numbers)
        if block:
            yield block

    def _parts(self, group: dict[str, Any]) -> Iterator[_Part]:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self._state_of(weight)
            numbers, gradient = own_share(weight).view(-1), own_share(weight.grad).reshape(-1)
            mean, square = (state[name].view(-1) for name in _MOMENTS)
            for start in range(0, len(numbers), self._block_numbers):
                some = slice(start, start + self._block_numbers)
                yield _Part(numbers[some], gradient[some], state["step"], (mean[some], square[some]))

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Made at the weight's first step."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            own = own_share(weight)
            state["step"] = torch.zeros((), dtype=torch.float32, device=own.device)
            for name in _MOMENTS:
                state[name] = torch.zeros(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        return state


def on_host(moment: Tensor) -> Tensor:
    """A moment that lies where its weight does, as `OffloadedAdamW` keeps it."""
    own = own_share(moment)
    return torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda).copy_(own)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some numbers of one weight. Each tensor but `steps` is [num_numbers]."""

    numbers: Tensor
    gradient: Tensor
    steps: Tensor
    """How many the weight has taken, as a number on the device."""
    on_host: tuple[Tensor, Tensor]
    """Its moments."""


def _update(group: dict[str, Any], block: Sequence[_Part], moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [part.numbers for part in block],
        [part.gradient for part in block],
        [mean for mean, _ in moments],
        [square for _, square in moments],
        [],
        [part.steps.clone() for part in block],  # counted here for each part, and for the weight once
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _Lanes:
    """The way of blocks to the device and back, each in the memory that the third one before it has left."""

    def __init__(self, like: Tensor, block_numbers: int) -> None:
        device = like.device
        self._computing = torch.cuda.current_stream(device)
        self._coming, self._going = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._staged = [like.new_empty(2, block_numbers) for _ in range(_BLOCKS_AT_ONCE)]
        self._arrived, self._updated, self._left = (
            [torch.cuda.Event() for _ in range(_BLOCKS_AT_ONCE)]  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._coming.wait_stream(self._computing)  # to which the memory belonged until now

    def bring(self, number: int, block: Sequence[_Part]) -> None:
        """Begin to copy block `number` to the device."""
        place = number % _BLOCKS_AT_ONCE
        with torch.cuda.stream(self._coming):
            self._coming.wait_event(self._left[place])
            for part, moments in zip(block, self._moments(place, block), strict=True):
                for moment, kept in zip(moments, part.on_host, strict=True):
                    moment.copy_(kept, non_blocking=True)
            self._arrived[place].record(self._coming)

    def arrived(self, number: int, block: Sequence[_Part]) -> list[tuple[Tensor, Tensor]]:
        """The block's moments on the device, for the stream that computes."""
        place = number % _BLOCKS_AT_ONCE
        self._computing.wait_event(self._arrived[place])
        return self._moments(place, block)

    def send_back(self, number: int, block: Sequence[_Part]) -> None:
        """Begin to copy what was made of it to the host."""
        place = number % _BLOCKS_AT_ONCE
        self._updated[place].record(self._computing)
        with torch.cuda.stream(self._going):
            self._going.wait_event(self._updated[place])
            for part, moments in zip(block, self._moments(place, block), strict=True):
                for moment, kept in zip(moments, part.on_host, strict=True):
                    kept.copy_(moment, non_blocking=True)
            self._left[place].record(self._going)

    def close(self) -> None:
        """Wait until all of them are on the host: who reads there, as a checkpoint does, asks no stream."""
        self._going.synchronize()

    def _moments(self, place: int, block: Sequence[_Part]) -> list[tuple[Tensor, Tensor]]:
        lengths = [len(part.numbers) for part in block]
        mean, square = (row[: sum(lengths)].split(lengths) for row in self._staged[place])
        return list(zip(mean, square, strict=True))
