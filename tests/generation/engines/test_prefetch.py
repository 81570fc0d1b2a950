"""Where new weights wait for an engine's next step."""

from __future__ import annotations

import pytest
import torch

from tailrace.generation.engines.prefetch import StagingBuffers

WEIGHTS = {"matrix": torch.arange(12.0).reshape(3, 4), "vector": torch.ones(3, dtype=torch.bfloat16)}


def test_on_a_cpu_weights_are_read_where_they_lie() -> None:
    assert StagingBuffers(torch.device("cpu")).fill(WEIGHTS) is WEIGHTS


@pytest.mark.gpu
def test_on_a_gpu_weights_wait_in_buffers_on_it_which_the_next_load_uses_again() -> None:
    staging = StagingBuffers(torch.device("cuda", 0))
    first = dict(staging.fill(WEIGHTS))
    assert all(first[name].is_cuda and torch.equal(first[name].cpu(), WEIGHTS[name]) for name in WEIGHTS)
    staging.wait_until_copied()
    second = staging.fill({name: tensor + 1 for name, tensor in WEIGHTS.items()})
    assert all(second[name] is first[name] for name in WEIGHTS)
    assert torch.equal(second["vector"].cpu(), torch.full((3,), 2, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_weights_that_find_no_room_on_a_gpu_wait_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 800))
    filled = StagingBuffers(torch.device("cuda", 0)).fill(WEIGHTS)
    assert all(tensor.is_pinned() and torch.equal(tensor, WEIGHTS[name]) for name, tensor in filled.items())
