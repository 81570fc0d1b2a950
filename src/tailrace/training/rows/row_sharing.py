"""Rows that several ranks compute together, a slice of tokens each: sequence parallelism for long rows.

    row of N tokens      rank 0: tokens 0 .. N/k        rank 1: N/k .. 2N/k        ...
    around attention     [own tokens, all heads] ──all to all──► [all tokens, own heads]  attention of the whole row
                         [own tokens, all heads] ◄──all to all── [all tokens, own heads]
    all else             embeddings, norms, MLPs, head and loss work on the own slice

Tokens are exchanged for heads, as DeepSpeed-Ulysses does (Jacobs et al. 2023, arXiv:2309.14509, §3.1). Slices differ by
a token at most, and nothing is padded. A token that bears loss belongs to the rank that computes the hidden state which
predicts it, so that no hidden state crosses a cut; what a loss sums over a sequence is summed over ranks,
differentiably (`RowGroup.sum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SETTING: Final = "trainer.sequence_parallel"


class RowGroup:
    """The ranks that share each row: this one has slice `index` of `size`."""

    def __init__(self, group: ProcessGroup, index: int, size: int) -> None:
        self.index, self.size = index, size
        self._group = group

    def cut(self, num_tokens: int) -> RowCut:
        """A row of so many tokens, at least one for each rank, in slices of about the same length."""
        if num_tokens < self.size:
            raise ValueError(f"a row of {num_tokens} tokens cannot be cut into {self.size} slices")
        edges = [num_tokens * index // self.size for index in range(self.size + 1)]
        return RowCut(self, tuple(end - start for start, end in pairwise(edges)))

    def sum(self, values: Tensor) -> Tensor:
        """Over these ranks, the same on each, differentiable; `values` are of one shape on all of them."""
        return _sum(values, self._group)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Of `rows` [sum(sent), width] the first `sent[0]` go to the first rank, and so on; [sum(received), width] in
        the order of the ranks that they come from. Differentiable."""
        return _exchange(rows, sent, received, self._group)


@dataclass(frozen=True, slots=True, eq=False)
class RowCut:
    """How one row is cut."""

    group: RowGroup
    sizes: tuple[int, ...]
    """Tokens of every slice."""

    @property
    def own(self) -> slice:
        """This rank's tokens."""
        edges = [*accumulate(self.sizes, initial=0)]
        return slice(edges[self.group.index], edges[self.group.index + 1])

    def gather_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Of queries, keys and values [own tokens, heads, head_size] those of all tokens, for this rank's heads alone.

        Where there are fewer heads of keys than ranks, several ranks get the same one. Raises `ModelError` where heads
        cannot be shared out.
        """
        size = self.group.size
        self._require_heads(query.shape[1], key.shape[1])
        if (copies := size // key.shape[1]) > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        own = len(query)
        parts = [
            torch.unflatten(tensor, 1, (size, -1)).flatten(2) for tensor in (query, key, value)
        ]  # [tokens, ranks, width]
        packed = torch.cat(parts, dim=2).transpose(0, 1).flatten(0, 1)
        gathered = self.group.exchange(packed, [own] * size, self.sizes)
        columns = torch.split(gathered, [part.shape[2] for part in parts], dim=1)
        sizes = [tensor.shape[2] for tensor in (query, key, value)]
        return tuple(torch.unflatten(column, 1, (-1, width)) for column, width in zip(columns, sizes, strict=True))

    def gather_heads(self, output: Tensor) -> Tensor:
        """[own tokens, heads, head_size] of `output` [all tokens, own heads, head_size]."""
        size, own = self.group.size, self.sizes[self.group.index]
        rows = self.group.exchange(output.flatten(1), self.sizes, [own] * size)
        by_rank = torch.unflatten(rows, 0, (size, own)).transpose(0, 1)  # [own tokens, ranks, own heads * head_size]
        return by_rank.reshape(own, -1, output.shape[2])

    def _require_heads(self, heads: int, key_heads: int) -> None:
        size = self.group.size
        if heads % size or (key_heads % size and size % key_heads):
            raise ModelError(
                f"{_SETTING} = {size}: {heads} heads of attention and {key_heads} of keys cannot be shared out over "
                f"{size} ranks, which must divide the first, and divide the second or be a multiple of it"
            )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found


class _Sum(torch.autograd.Function):
    """Each rank's part has a part in what all of them make of the sum: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


def _all_reduce(values: Tensor, group: ProcessGroup) -> Tensor:
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


_exchange: Callable[[Tensor, Sequence[int], Sequence[int], Any], Tensor] = _Exchange.apply
_sum: Callable[[Tensor, Any], Tensor] = _Sum.apply
