"""Matrix products by oneDNN: which are faster than torch's own choice, by processor, never by a stopwatch.

oneDNN compiles a program for every number of rows, half a megabyte in a millisecond, and keeps 1,024 of them. Rows are
therefore filled up to one of few numbers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

_FIRST_WIDE_FAMILY = 26
_BLOCK_ROWS = (2048, 512, 128)
_BLOCK_VALUES = 4 << 20


@cache
def gains_in_float32() -> bool:
    """Whether products of float32 matrices gain: on AMD's processors with AVX-512, where torch takes MKL's."""
    return (
        torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _has_linear()
        and any("AuthenticAMD" in line for line in _processor_lines())
    )


@cache
def gains_in_outer_products() -> bool:
    """Whether gradients of float32 weights gain: on AMD's processors whose AVX-512 is as wide as it is called (Zen 5).

    There oneDNN multiplies at 160 to 210 GFLOP/s, transposing one side included, and torch's MKL, which takes AVX2, at
    100; on those before, the transposing would eat what it gains.
    """
    family = next((line for line in _processor_lines() if line.startswith("cpu family")), "0")
    return gains_in_float32() and int(family.split()[-1]) >= _FIRST_WIDE_FAMILY


def gains_packed(dtype: torch.dtype) -> bool:
    """Whether products with matrices that oneDNN laid out beforehand gain; in bfloat16 torch takes oneDNN anyway."""
    if dtype is torch.bfloat16:
        return _has_linear() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 and gains_in_float32()


@cache
def _processor_lines() -> list[str]:
    processors = Path("/proc/cpuinfo")
    return processors.read_text().splitlines() if processors.exists() else []


def _has_linear() -> bool:
    """Whether this build of torch offers oneDNN's linear layer."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` [num_rows, inputs] times the transpose of `matrix` [outputs, inputs], plain or packed."""
    products: Tensor = torch.ops.mkldnn._linear_pointwise(_filled(rows), matrix, bias, "none", [], "")
    return products[: len(rows)]


def fast_product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same over a plain matrix, by whichever is faster here."""
    if rows.dtype is torch.float32 and rows.device.type == "cpu" and gains_in_float32():
        return product(rows, matrix, bias)
    if _is_onednns(rows):
        return F.linear(_filled(rows), matrix, bias)[: len(rows)]
    return F.linear(rows, matrix, bias)


def outer_product(grads: Tensor, inputs: Tensor) -> Tensor:
    """[outputs, inputs]: the transpose of `grads` [num_rows, outputs] times `inputs` [num_rows, inputs]."""
    if _is_onednns(inputs):
        return _filled(grads).t() @ _filled(inputs)
    if not _gains_by_blocks(inputs):
        return grads.t() @ inputs
    total = grads.new_zeros(grads.shape[1], inputs.shape[1])
    add_outer_product(total, grads, inputs)
    return total


def add_outer_product(total: Tensor, grads: Tensor, inputs: Tensor) -> None:
    """Add it to `total`, all of one dtype. No second matrix of that size is ever whole in memory.

    In blocks of few sizes, each of which has its program; what is left over is torch's own.
    """
    start, width = 0, max(1, _BLOCK_VALUES // inputs.shape[1])
    for size in _BLOCK_ROWS if _gains_by_blocks(inputs) else ():
        while len(grads) - start >= size:
            rows = slice(start, start + size)
            for first in range(0, len(total), width):
                columns = slice(first, first + width)
                total[columns] += _transposed_product(grads[rows, columns], inputs[rows])
            start += size
    total.addmm_(grads[start:].t(), inputs[start:])


def _gains_by_blocks(inputs: Tensor) -> bool:
    return inputs.dtype is torch.float32 and inputs.device.type == "cpu" and gains_in_outer_products()


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """The transpose of `left` [rows, outputs] times `right` [rows, inputs].

    oneDNN wants one side transposed in memory: the narrower one, which is fewer bytes, unless the other is a part of
    wider rows, for whose transpose it has no fast program.
    """
    if left.shape[1] > right.shape[1] and left.is_contiguous():
        return _transposed_product(right, left).t()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left.t().contiguous(), right.t(), None, "none", [], "")
    return found


def filled_rows(count: int) -> int:
    """The next of 1, 4, 8, 16, 24, ..., 256, 264, ..., 512, 528, ...: thirty-two for every doubling from 256 on.

    >>> [filled_rows(count) for count in (1, 2, 5, 64, 65, 300, 1000)]
    [1, 4, 8, 64, 72, 304, 1008]
    """
    if count <= 1:
        return count
    step = 4 if count <= 4 else max(8, 1 << max(0, (count - 1).bit_length() - 6))
    return -(-count // step) * step


def for_several_products(rows: Tensor) -> Tensor:
    """`rows` as the products above take them, with zeros below where they would be copied each time."""
    return _filled(rows) if _is_onednns(rows) else rows


def _filled(rows: Tensor) -> Tensor:
    """`rows` [num_rows, size] and zeros below them: [filled_rows(num_rows), size]."""
    count = filled_rows(len(rows))
    if count == len(rows):
        return rows
    filled = rows.new_empty(count, rows.shape[1])  # F.pad would write all of it twice
    filled[: len(rows)] = rows
    filled[len(rows) :] = 0
    return filled


def _is_onednns(rows: Tensor) -> bool:
    """Whether torch itself takes oneDNN's products."""
    return rows.dtype is torch.bfloat16 and rows.device.type == "cpu"
