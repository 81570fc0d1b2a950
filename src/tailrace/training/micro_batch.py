"""One row of a batch as tensors: what a forward pass needs, and what the loss needs of the tokens that bear it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.errors import TrainingError
from tailrace.records import BatchRow, ExpertArray
from tailrace.training.attention import Segments
from tailrace.training.losses import LossTokens
from tailrace.training.shared_prefixes import share_prefixes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed row. The token at a position is predicted by the hidden state before it."""

    input_ids: Tensor
    """[1, num_tokens], int64: every token of the row, those that samples share once."""
    segments: Segments
    predictors: Tensor
    """[num_loss_tokens]: places in `input_ids` whose hidden states predict the tokens that bear loss."""
    tokens: LossTokens
    fresh: Tensor
    """[num_loss_tokens]: True where the token was sampled by the version that trains on it, over its own cache."""
    mixed: Tensor
    """[num_loss_tokens]: the same, where older versions had a part in the cache."""
    routed_experts: Tensor | None = None
    """[num_tokens of `input_ids`, layers, top_k], uint8 or uint16: what generation chose, for `RouterReplay`."""

    @classmethod
    def of(
        cls,
        row: BatchRow,
        version: int,
        device: torch.device | str = "cpu",
        routed_experts: ExpertArray | None = None,  # [num_tokens, layers, top_k], for every token of the row
    ) -> MicroBatch:
        """Prepare a row for a trainer that holds policy `version`. On a CPU samples share the beginnings they share;
        elsewhere attention's own packing leaves no room for that.

        On a CPU `routed_experts` may stay where they are, until the row is trained on; where they are unknown, they may
        be filled in.

        Raises `TrainingError` for a sample whose first token bears loss: nothing predicts it.
        """
        positions = np.flatnonzero(row.loss_mask)
        lengths = row.sample_lengths
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        if row.loss_mask[starts].any():
            raise TrainingError("a sample's first token bears loss, but nothing comes before it to predict it")
        temperatures = np.repeat(row.temperatures, lengths)[positions]
        tokens = LossTokens(
            targets=_tensor(row.token_ids[positions].astype(np.int64), device),
            logprobs=_tensor(row.logprobs[positions], device),
            advantages=_tensor(row.advantages[positions], device),
            inverse_temperatures=_tensor((1.0 / temperatures).astype(np.float32), device),
        )
        own, mixed = row.policy_versions[positions] == version, row.mixed_cache[positions]
        on_cpu = torch.device(device).type == "cpu"
        shared = share_prefixes(row.token_ids, lengths.tolist(), routed_experts) if on_cpu else None
        if shared is not None and routed_experts is not None:
            routed_experts = shared.gather_experts(routed_experts)
        token_ids = row.token_ids if shared is None else row.token_ids[shared.computed]
        predictors = positions - 1 if shared is None else shared.place[positions - 1]
        return cls(
            input_ids=_tensor(token_ids.astype(np.int64), device)[None],
            segments=Segments.of(lengths.tolist(), device, shared),
            predictors=_tensor(predictors, device),
            tokens=tokens,
            fresh=_tensor(own & ~mixed, device),
            mixed=_tensor(own & mixed, device),
            routed_experts=None if routed_experts is None else torch.from_numpy(routed_experts).to(device),
        )


def split_samples(row: BatchRow) -> list[BatchRow]:
    """The samples of a row, each as a row of its own: for models whose rows cannot be packed."""
    ends = np.cumsum(row.sample_lengths)
    return [
        BatchRow(
            token_ids=row.token_ids[end - length : end],
            logprobs=row.logprobs[end - length : end],
            policy_versions=row.policy_versions[end - length : end],
            loss_mask=row.loss_mask[end - length : end],
            mixed_cache=row.mixed_cache[end - length : end],
            advantages=row.advantages[end - length : end],
            temperatures=row.temperatures[index : index + 1],
            sample_lengths=row.sample_lengths[index : index + 1],
            payloads=row.payloads.between(end - length, end),
        )
        for index, (end, length) in enumerate(zip(ends.tolist(), row.sample_lengths.tolist(), strict=True))
    ]


def _tensor(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """A copy: batches lie in shared memory that is recycled, and may be read-only."""
    return torch.tensor(array, device=device)
