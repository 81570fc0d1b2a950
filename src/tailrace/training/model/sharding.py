"""A policy's weights, gradients and moments shared out over ranks, by torch's FSDP2.

    unit              gathered for
    each decoder layer   its own forward, and again its own backward
    embeddings, head     theirs; where they are one matrix they belong to the rest
    the rest             the whole of a forward and backward (final norm, tied embeddings)

A unit's weights are whole only while its module's own forward or backward runs. Gradients are summed over ranks, never
averaged: each rank's loss is divided by the planned figure of the whole batch.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor, nn

from tailrace.errors import ModelError
from tailrace.training.losses.no_loss import NO_LOSS, empty_row, probe_row
from tailrace.training.model.checkpointed_layers import decoder_layers
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.ranks import JoinedRanks
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.row_sharing import RowGroup

_INSTEAD = "train it with trainer.ranks = 1"
_PROBE_LENGTHS = (5, 3, 7)
_SLICE_TOLERANCE = {False: 1e-3, True: 3e-2}
"""Of log-probabilities, without and with autocast: fewer tokens and heads at a time add up in another order."""


def share_out(policy: PolicyModel, ranks: JoinedRanks) -> None:
    """Leave each rank its share of every weight. Raises `ModelError` for a model that cannot be shared out, or whose
    rows cannot where ranks share them.

    All ranks hold the same whole weights before. A pass without loss goes through the shards first, forward and
    backward, so that what a model does with its weights outside of their own modules fails here and not in a step.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if len({*map(str, ranks.gather(sums_of_bits(policy)))}) > 1:
        raise ModelError(
            f"the trainer's ranks loaded different weights of {type(policy.model).__name__}: give all the same files"
        )
    if ranks.row_group is not None:
        with ranks.exchanging():
            _try_slices(policy, ranks.row_group, ranks)
    units, mesh = _units(policy), ranks.mesh(policy.device.type)
    # What is frozen has no backward pass, for whose sake the rest would stay gathered.
    reshards = None if any(weight.requires_grad for weight in policy.parameters()) else True
    try:
        for unit in (*units, policy):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshards)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # else float32 asks for a product that gloo lacks
                if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                    module.set_reduce_scatter_unused_params(True)  # experts that only other ranks' tokens met
        with ranks.exchanging():
            _try_out(policy, ranks.row_group)
    except (ValueError, NotImplementedError, TypeError, AssertionError) as error:
        raise ModelError(
            f"{type(policy.model).__name__} cannot be shared out over ranks: {error}; {_INSTEAD}"
        ) from error


def _units(policy: PolicyModel) -> list[nn.Module]:
    """What is gathered apart from the rest."""
    model = policy.model
    layers = decoder_layers(model)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no decoder layers to share out over ranks: {_INSTEAD}")
    ends: list[nn.Module] = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one]
    shared = Counter(id(weight) for unit in (*layers, *ends) for weight in unit.parameters())
    if any(shared[id(weight)] > 1 for layer in layers for weight in layer.parameters()):
        raise ModelError(f"layers of {type(model).__name__} share weights, which FSDP cannot share out: {_INSTEAD}")
    return [*layers, *(end for end in ends if all(shared[id(weight)] == 1 for weight in end.parameters()))]


@torch.no_grad()
def _try_slices(policy: PolicyModel, group: RowGroup, ranks: JoinedRanks) -> None:
    """Require of every slice of a row what the model, still whole here, makes of it in the whole row."""
    lengths = _PROBE_LENGTHS * -(-2 * group.size // sum(_PROBE_LENGTHS))
    row = probe_row(lengths, policy.model.config.get_text_config().vocab_size)
    whole, own = (MicroBatch.of(row, 0, policy.device, padded=policy.pads_segments, group=one) for one in (None, group))
    found, expected = policy(own, NO_LOSS).logprobs, policy(whole, NO_LOSS).logprobs

    def compare() -> None:
        places = torch.from_numpy(np.searchsorted(whole.positions, own.positions)).to(policy.device)
        bound = _SLICE_TOLERANCE[policy.under_autocast] * float(expected.abs().max())
        if not bool(((found - expected[places]).abs() <= bound).all()):
            raise ModelError(
                f"{type(policy.model).__name__} comes to other log-probabilities where ranks share a row, since more "
                "than its attention looks at other tokens: leave out trainer.sequence_parallel"
            )

    ranks.agree(compare)


def _try_out(policy: PolicyModel, group: RowGroup | None) -> None:
    micro_batch = MicroBatch.of(empty_row(), 0, policy.model.device, padded=policy.pads_segments, group=group)
    output = policy(micro_batch, NO_LOSS)
    if output.total.requires_grad:
        torch.autograd.backward(output.total)
    untouched = [name for name, weight in policy.named_parameters() if weight.requires_grad and weight.grad is None]
    for weight in policy.parameters():
        weight.grad = None
    if untouched:
        raise ModelError(
            f"{len(untouched)} weights of {type(policy.model).__name__} got no gradient ({untouched[0]}, ...), and "
            f"ranks would wait for each other's: {_INSTEAD}"
        )


@torch.no_grad()
def sums_of_bits(model: nn.Module) -> list[int]:
    """Of every weight, which is whole: as good as a checksum, and the same in any order."""
    words = (weight.reshape(-1).view(torch.int32) for weight in model.parameters())
    return [int(each.sum(dtype=torch.int64)) for each in words]


def whole(tensor: Tensor) -> Tensor:
    """All ranks' shares of a tensor; itself where it is not shared out. All ranks call it together."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_share(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor, in the same memory; itself where it is not shared out."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole `tensor`, as `like` is shared out, on its device; no communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
