"""A frozen model beside the policy: how likely it finds the tokens that bear loss.

micro-batch ─► reference, without gradient ─► column `reference_logprobs` of its `LossTokens` ─► the policy's loss
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tailrace.errors import ModelError
from tailrace.models.loading import load_causal_lm
from tailrace.training.losses import LossTokens
from tailrace.training.model.adapter import Adapter
from tailrace.training.model.head import LossOutput
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.trainer import TrainerSettings


class Reference(Protocol):
    """Ranks call it for the same micro-batches in the same order, since it may exchange weights."""

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """[num_loss_tokens], at the temperatures of the tokens' samples, without gradient."""
        ...


class FrozenReference(Reference):
    """A model of its own, whole or shared out."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """By the head in chunks, as the policy's are."""
        output: LossOutput = self._model(micro_batch, _score)
        return output.logprobs


class BaseOfAdapter(Reference):
    """The policy without its adapter, which is the initial model: there is no second one."""

    def __init__(self, policy: PolicyModel, adapter: Adapter) -> None:
        self._policy, self._adapter = policy, adapter

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """By the head in chunks, as the policy's are."""
        with self._adapter.switched_off():
            output: LossOutput = self._policy(micro_batch, _score)
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


def _score(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """A loss of nothing; it is not pointwise, so that the head looks for no gradients."""
    return torch.zeros_like(logprobs), torch.ones_like(logprobs, dtype=torch.bool)
