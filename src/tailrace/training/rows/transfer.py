"""Records of tensors to the trainer's device: one buffer, one asynchronous copy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

RecordT = TypeVar("RecordT")

_ALIGNMENT = 16
"""Bytes; a view of the buffer in another dtype needs a multiple of that dtype's size."""


def to_device(record: RecordT, device: torch.device | str) -> RecordT:
    """The dataclass `record` with its tensors, nested ones too, on `device`, as views of one buffer.

    Kernels launched afterwards see the whole of it. On a CPU `record` itself.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return record
    tensors: list[Tensor] = []
    _map_tensors(record, tensors.append)
    sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    *starts, num_bytes = itertools.accumulate(sizes, initial=0)
    # From pinned memory the copy is asynchronous; torch keeps the pinned block until it is done.
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start in zip(tensors, starts, strict=True):
        if tensor.nbytes:  # an empty one from NumPy has strides that no view takes
            packed[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    packed = packed.to(device, non_blocking=True)
    following = iter(starts)

    def view(tensor: Tensor) -> Tensor:
        start = next(following)
        return packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return cast("RecordT", _map_tensors(record, view))


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with the results of `function` for tensors; dataclasses, tuples and mappings are searched, in order."""
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            cast("Any", value), **{name: _map_tensors(getattr(value, name), function) for name in names}
        )
    if isinstance(value, tuple):
        return tuple(_map_tensors(child, function) for child in value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(child, function) for key, child in value.items()}
    return value
