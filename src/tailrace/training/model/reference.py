"""A frozen model beside the policy: how likely it finds the tokens that bear loss.

micro-batch ─► reference, without gradient ─► column `reference_logprobs` of its `LossTokens` ─► the policy's loss
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from tailrace.errors import ModelError
from tailrace.models.loading import load_causal_lm
from tailrace.training.losses.no_loss import NO_LOSS
from tailrace.training.model.adapter import Adapter
from tailrace.training.model.head import LossOutput
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.trainer import TrainerSettings


class Reference:
    """A model of its own, whole or shared out, or with an `adapter` the policy without it, which is the initial model.

    Ranks call it for the same micro-batches in the same order, since it may exchange weights.
    """

    def __init__(self, model: PolicyModel, adapter: Adapter | None = None) -> None:
        self._model, self._adapter = model, adapter

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """[num_loss_tokens], at the temperatures of the tokens' samples; by the head in chunks, as the policy's are."""
        with nullcontext() if self._adapter is None else self._adapter.switched_off():
            output: LossOutput = self._model(micro_batch, NO_LOSS)
        return output.logprobs


def load_frozen(name: str, policy: PolicyModel, settings: TrainerSettings) -> PolicyModel:
    """The model called `name`, without gradients, for the rows that `policy` computes. Raises `ModelError`."""
    model = load_causal_lm(name, dtype="float32", device=settings.device)
    model.requires_grad_(requires_grad=False)
    frozen = PolicyModel(
        model,
        dtype=settings.chosen_dtype,
        head_dtype=settings.chosen_head_dtype,
        native_kernels=settings.native_kernels,
    )
    if (policy.packs and not frozen.packs) or (frozen.pads_segments and not policy.pads_segments):
        raise ModelError(
            f"the reference model {name!r} ({type(model).__name__}) cannot compute the rows that are packed for "
            f"{type(policy.model).__name__}: choose a reference of the policy's own architecture"
        )
    return frozen
