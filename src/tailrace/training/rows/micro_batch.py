"""One row of a batch as tensors: input of the forward pass, and of the loss at the tokens that bear it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.errors import TrainingError
from tailrace.records import BatchRow, BoolArray, ExpertArray, unrecorded
from tailrace.training.losses import LossTokens
from tailrace.training.losses.supports import TokenSupports
from tailrace.training.rows.attention import Segments
from tailrace.training.rows.row_sharing import RowCut, RowGroup
from tailrace.training.rows.shared_prefixes import share_prefixes
from tailrace.training.rows.transfer import to_device


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed row, or this rank's slice of one. The token at a position is predicted by the hidden state before it."""

    input_ids: Tensor
    """[1, num_tokens], int64: every token of the row or slice, those that samples share once."""
    segments: Segments
    """Of the whole row."""
    positions: NDArray[np.int64]
    """[num_loss_tokens]: where in the row as it was given, on the host."""
    predictors: Tensor
    """[num_loss_tokens]: places in `input_ids` whose hidden states predict the tokens that bear loss."""
    tokens: LossTokens
    fresh: Tensor
    """[num_loss_tokens]: True where the token was sampled by the version that trains on it, over its own cache."""
    mixed: Tensor
    """[num_loss_tokens]: the same, where older versions had a part in the cache."""
    environments: Tensor
    """[num_loss_tokens], int64: which of the batch's environments the token is of; 0 where nobody knows."""
    routed_experts: Tensor | None = None
    """[num_tokens of `input_ids`, layers, top_k], uint8 or uint16: what generation chose, for `RouterReplay`."""
    cut: RowCut | None = None
    """Where several ranks share the row."""

    @classmethod
    def of(
        cls,
        row: BatchRow,
        version: int,
        device: torch.device | str = "cpu",
        routed_experts: ExpertArray | None = None,  # [num_tokens, layers, top_k], for every token of the row
        *,
        padded: bool = True,
        others: BoolArray | None = None,  # [num_tokens]: those that bear components, too
        group: RowGroup | None = None,
    ) -> MicroBatch:
        """Prepare a row for a trainer that holds policy `version`; to a GPU it goes in one copy.

        `padded` says whether attention needs padded segments (`PolicyModel.pads_segments`). Samples share equal
        prefixes: all of them on a CPU; on a GPU where attention takes rows as they are, and enough is saved. On a CPU
        `routed_experts` are not copied; unknown ones may be filled in, in place. With `group`, this is the slice of one
        of the ranks that share the row, and has the loss tokens that it predicts. Raises `TrainingError` for a sample
        whose first token bears loss, since nothing predicts it, and for a token outside its own support.
        """
        token_ids, lengths = row.token_ids, row.sample_lengths.tolist()
        positions = _loss_positions(row, row.loss_mask if others is None else row.loss_mask | others)
        if group is not None and (missing := group.size - len(token_ids)) > 0:  # a sample that bears no loss
            token_ids, lengths = np.append(token_ids, np.zeros(missing, np.int32)), [*lengths, missing]
            routed_experts = None if routed_experts is None else _lengthened(routed_experts, missing)
        on_cpu = torch.device(device).type == "cpu"
        # On a GPU a padded group's gradients would be added up by atomics: not the same bits twice.
        shared = share_prefixes(token_ids, lengths, routed_experts) if on_cpu or not padded else None
        if shared is not None and not (padded or shared.saves_enough):
            shared = None
        if shared is not None and group is not None and np.count_nonzero(shared.computed) < group.size:
            shared = None
        if shared is not None and routed_experts is not None:
            routed_experts = shared.gather_experts(routed_experts)
        token_ids = token_ids if shared is None else token_ids[shared.computed]
        predictors = positions - 1 if shared is None else shared.place[positions - 1]
        cut = None if group is None else group.cut(len(token_ids))
        if cut is not None:
            here, token_ids = cut.own, token_ids[cut.own]
            routed_experts = None if routed_experts is None else routed_experts[here]
            is_own = (predictors >= here.start) & (predictors < here.stop)
            positions, predictors = positions[is_own], predictors[is_own] - here.start
        own, mixed = row.policy_versions[positions] == version, row.mixed_cache[positions]
        micro_batch = cls(
            input_ids=torch.from_numpy(token_ids.astype(np.int64))[None],
            segments=Segments.of(lengths, shared, padded=padded),
            predictors=torch.from_numpy(predictors),
            positions=positions,
            tokens=_select_loss_tokens(row, positions, group),
            fresh=torch.from_numpy(own & ~mixed),
            mixed=torch.from_numpy(own & mixed),
            environments=torch.from_numpy(_environments(row)[positions]),
            routed_experts=None if routed_experts is None else torch.from_numpy(routed_experts),
            cut=cut,
        )
        return to_device(micro_batch, device)

    def of_rewards(self) -> MicroBatch:
        """The same with only the tokens that bear the loss of rewards; `positions` stay those of all."""
        if (places := self.tokens.reward_places) is None:
            return self
        columns = (self.predictors, self.fresh, self.mixed, self.environments)
        predictors, fresh, mixed, environments = (column[places] for column in columns)
        return replace(
            self,
            predictors=predictors,
            tokens=self.tokens.of_rewards(),
            fresh=fresh,
            mixed=mixed,
            environments=environments,
        )

    def with_column(self, name: str, column: Tensor) -> MicroBatch:
        """The same with one more column of its loss tokens, [num_loss_tokens] or [num_loss_tokens, k]."""
        return replace(self, tokens=replace(self.tokens, columns={**self.tokens.columns, name: column}))


def _loss_positions(row: BatchRow, bears_loss: BoolArray) -> NDArray[np.int64]:
    """[num_loss_tokens]: where in the row tokens bear any loss."""
    starts = np.cumsum(row.sample_lengths) - row.sample_lengths
    if bears_loss[starts].any():
        raise TrainingError("a sample's first token bears loss, but nothing comes before it to predict it")
    return np.flatnonzero(bears_loss)


def _environments(row: BatchRow) -> NDArray[np.int64]:
    """[num_tokens of the row]: each token's environment."""
    of_samples = np.array(row.origins.environment_ids or [0] * len(row.sample_lengths), np.int64)
    return np.repeat(of_samples, row.sample_lengths)


def _sample_edges(row: BatchRow, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """[num_samples + 1]: where the tokens of each sample begin among those at `positions`."""
    return np.searchsorted(positions, np.concatenate([[0], np.cumsum(row.sample_lengths)]))


def _lengthened(routed_experts: ExpertArray, count: int) -> ExpertArray:
    """With so many tokens more that route themselves."""
    unknown = np.full((count, *routed_experts.shape[1:]), unrecorded(routed_experts.dtype), routed_experts.dtype)
    lengthened: ExpertArray = np.concatenate([routed_experts, unknown])
    return lengthened


def _select_loss_tokens(row: BatchRow, positions: NDArray[np.int64], group: RowGroup | None) -> LossTokens:
    """Copies, since selected by index: batches lie in shared memory that is recycled, and may be read-only."""
    edges, whole_edges = _sample_edges(row, positions), _sample_edges(row, np.flatnonzero(row.loss_mask))
    rewarded = row.loss_mask[positions]
    places = None if rewarded.all() else np.flatnonzero(rewarded)
    own_edges = edges if places is None else _sample_edges(row, positions[places])
    return LossTokens(
        targets=torch.from_numpy(row.token_ids[positions].astype(np.int64)),
        logprobs=torch.from_numpy(row.logprobs[positions]),
        advantages=torch.from_numpy(row.advantages[positions]),
        temperatures=torch.from_numpy(np.repeat(row.temperatures, row.sample_lengths)[positions]),
        policy_versions=torch.from_numpy(row.policy_versions[positions]),
        sample_offsets=torch.from_numpy(edges),
        columns={name: torch.from_numpy(column[positions]) for name, column in row.columns.items()},
        whole_lengths=torch.from_numpy(np.diff(whole_edges)),
        rewarded=None if places is None else torch.from_numpy(rewarded),
        reward_places=None if places is None else torch.from_numpy(places),
        reward_offsets=None if places is None else torch.from_numpy(own_edges),
        supports=_select_supports(row, positions),
        reward_supports=None if places is None else _select_supports(row, positions[places]),
        sum_over_ranks=None if group is None else group.sum,
    )


def _select_supports(row: BatchRow, positions: NDArray[np.int64]) -> TokenSupports | None:
    if row.supports is None:
        return None
    chosen = row.supports.at(positions)
    counts = chosen.counts
    found = np.repeat(row.token_ids[positions], counts) == chosen.token_ids
    has_own = np.zeros(len(positions), np.bool_)
    has_own[np.repeat(np.arange(len(positions)), counts)[found]] = True
    if not has_own[counts > 0].all():
        raise TrainingError("a token is not among those that it was sampled from: its batch is damaged")
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return TokenSupports(torch.from_numpy(chosen.token_ids), torch.from_numpy(counts), offsets)
