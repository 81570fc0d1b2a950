"""Records of tensors from the host to the trainer's device: one buffer, one copy, nobody waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

RecordT = TypeVar("RecordT")

_ALIGNMENT = 16
"""Bytes; a view of the buffer in another dtype needs a multiple of that dtype's size."""


def to_device(record: RecordT, device: torch.device | str) -> RecordT:
    """The dataclass `record`, its tensors (nested ones too) on `device`: views of one buffer that is on its way there.

    Kernels that are launched afterwards see the whole of it. On a CPU `record` itself.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return record
    tensors = list(_tensors(record))
    starts, num_bytes = [], 0
    for tensor in tensors:
        starts.append(num_bytes)
        num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    # From pinned memory the copy is asynchronous; torch keeps the pinned block until it is done.
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start in zip(tensors, starts, strict=True):
        if tensor.nbytes:  # an empty one from NumPy has strides that no view takes
            packed[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    packed = packed.to(device, non_blocking=True)
    views = iter(
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    )
    return cast("RecordT", _replace(record, lambda: next(views)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """In the order in which `_replace` asks for their replacements."""
    if isinstance(value, Tensor):
        yield value
    else:
        for child in _children(value).values():
            yield from _tensors(child)


def _replace(value: Any, following: Callable[[], Tensor]) -> Any:
    """`value` with every tensor in it replaced."""
    if isinstance(value, Tensor):
        return following()
    replaced = {key: _replace(child, following) for key, child in _children(value).items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(cast("Any", value), **replaced)
    if isinstance(value, tuple):
        return tuple(replaced.values())
    return replaced if isinstance(value, Mapping) else value


def _children(value: Any) -> Mapping[Any, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else {}
