"""A row as tensors: copies of what the batch holds, in one piece on the way to a device."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.transfer import to_device
from tests.training.tiny import build_batch


def row_with_columns():  # type: ignore[no-untyped-def]
    row = build_batch(lengths=(9, 4, 3, 12), rows=(4,), prompt=4, temperature=0.5, supports=True).row(0)
    count = len(row.token_ids)
    columns = {"teacher": np.arange(count, dtype=np.float32), "top": np.arange(2 * count).reshape(count, 2)}
    return dataclasses.replace(row, columns=columns)


def test_a_loss_knows_samples_versions_temperatures_and_named_columns() -> None:
    row = row_with_columns()
    tokens = MicroBatch.of(row, 0).tokens
    assert tokens.sample_offsets.tolist() == [0, 5, 5, 5, 13]  # two samples are prompts alone
    assert tokens.policy_versions.tolist() == [0] * 13
    assert tokens.temperatures.tolist() == [0.5] * 13
    assert np.array_equal(tokens.columns["teacher"], np.flatnonzero(row.loss_mask))
    assert tokens.columns["top"].shape == (13, 2)


def test_tensors_outlive_the_memory_of_the_batch() -> None:
    row = row_with_columns()
    micro_batch = MicroBatch.of(row, 0)
    before = [tensor.clone() for tensor in all_tensors(micro_batch)]
    supports = (row.supports.token_ids, row.supports.counts)
    for column in (row.token_ids, row.logprobs, row.advantages, row.policy_versions, *supports, *row.columns.values()):
        column[:] = 77
    assert all(torch.equal(one, other) for one, other in zip(before, all_tensors(micro_batch), strict=True))


def test_everything_goes_to_a_device_in_one_copy() -> None:
    micro_batch = MicroBatch.of(row_with_columns(), 0)
    assert to_device(micro_batch, "cpu") is micro_batch
    copies: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten._to_copy.default:
                copies.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    with Watch():
        moved = to_device(micro_batch, "meta")
    assert len(copies) == 1
    for one, other in zip(all_tensors(moved), all_tensors(micro_batch), strict=True):
        assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, "meta")
    assert moved.segments.lengths == micro_batch.segments.lengths


def all_tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        children = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else []
    return [tensor for child in children for tensor in all_tensors(child)]
