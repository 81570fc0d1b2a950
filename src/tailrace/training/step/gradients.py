"""Gradients of a batch: forward and backward of every row of this rank, in as many rounds as every other rank.

row by row: experts ─► micro-batch ─► reference ─► forward, loss ─► backward ─► sums for metrics
             └─ a rank that has no row left takes part with an empty one, without loss and gradient

Where components are added to a loss that may reject tokens, and is divided by those that it keeps, one rescaling at the
end would not do: the rows go through the model once more before, only to count them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.records import Batch, BatchRow, BatchSummary, BoolArray, ExpertArray, OpenPayload
from tailrace.training.losses import Component, Divisor, Loss, add_up
from tailrace.training.losses.no_loss import NO_LOSS, empty_row
from tailrace.training.losses.reference_kl import REFERENCE_LOGPROBS
from tailrace.training.model.head import LossOutput
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.model.reference import Reference
from tailrace.training.model.router_replay import RouterReplay
from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.reports.token_export import TokenExport
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.step.loss_sums import LossSums

_log = logging.getLogger(__name__)


class RowOutput(NamedTuple):
    """What became of a row's tokens that bear the loss of rewards, as far as this rank computed them; the total is
    with components."""

    positions: NDArray[np.int64]
    """[num_loss_tokens]: where in the row."""
    output: LossOutput


class GradientPasses:
    """Adds the gradients of batches to those of a policy's weights.

    `components` are added to the loss, for which `reference` fills a column. `open_payload` opens the routed experts
    that batches refer to, for `replay`; `export` gets every token.
    """

    def __init__(
        self,
        policy: PolicyModel,
        loss: Loss,
        divisor: Divisor,
        *,
        components: Sequence[Component] = (),
        reference: Reference | None = None,
        replay: RouterReplay | None = None,
        open_payload: OpenPayload | None = None,
        export: TokenExport | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._policy, self._loss, self._divisor = policy, loss, divisor
        self._components, self._reference = tuple(components), reference
        self._replay, self._ranks = replay, ranks
        self._open_payload, self._export = open_payload, export
        self._experts: ExpertArray | None = None
        self._objective: tuple[Loss, float] = loss, 1.0
        """What the tokens of the batch that was added last sum up, and what that is divided by."""

    def add(
        self, batch: Batch, version: int, outputs: list[RowOutput] | None = None, *, exports: bool = True
    ) -> LossSums:
        """Go through this rank's rows with a trainer that holds `version`; the sums are of all ranks.

        The loss is divided by the planned figure of the whole batch; that of each component by its own. `outputs` gets
        what became of each of `rows`, components left out. Without `exports` no token of it is exported.
        """
        # One that no token of the batch bears may lack its column.
        borne = [component for component in self._components if component.planned(batch.summary)]
        sums = LossSums(self._loss, self._divisor, batch.origins.environments, borne, version)
        rows = self.rows(batch)
        rounds = max(self._ranks.gather(len(rows)))
        exports = exports and self._export is not None and self._export.wants(batch.summary.step)
        self._objective = self._objective_of(batch.summary, rows, rounds, version)
        with self._ranks.exchanging():
            for row in rows:
                output = self._add_row(row, version, sums, exports=exports)
                if outputs is not None:
                    outputs.append(output)
            for _ in range(rounds - len(rows)):
                self.pass_over(None, version)
        if self._export is not None and exports:
            self._export.end_step(batch.summary.step)
        sums.reduce(self._ranks)
        return sums

    @property
    def weights(self) -> list[Tensor]:
        """That gradients are added to."""
        return [weight for weight in self._policy.parameters() if weight.requires_grad]

    def rows(self, batch: Batch) -> list[BatchRow]:
        """Those with tokens that bear loss; each sample is a row where the model does not pack."""
        edges = batch.row_offsets.tolist() if self._policy.packs else range(len(batch.sample_offsets))
        rows = (batch.samples(first, last) for first, last in itertools.pairwise(edges))
        return [row for row in rows if row.loss_mask.any() or any(map(np.any, self._borne_by_components(row)))]

    def teaches(self, batch: BatchSummary, kept: int) -> bool:
        """Whether anything of a batch bears a gradient, of whose tokens the loss kept so many."""
        return kept > 0 or any(component.factor(batch) for component in self._components)

    def rescaling(self, batch: BatchSummary, kept: int) -> float:
        """What gradients are to be multiplied by once it is known how many tokens the loss kept."""
        return 1.0 if self._components else self._divisor.planned(batch) / self._divisor.final(batch, kept)

    def pass_over(self, row: BatchRow | None, version: int) -> tuple[MicroBatch, LossOutput]:
        """Forward and backward of a row of the batch that was added last; without one, of an empty one, since each rank
        takes part in every pass.

        The output's total has no gradient any more.
        """
        micro_batch = self._referred(self._micro_batch_of(row, version))
        loss, divisor = self._objective
        # The backward pass too: where activations are computed twice, it asks the routers again.
        with nullcontext() if self._replay is None else self._replay.using(micro_batch.routed_experts):
            output = self._policy(micro_batch, NO_LOSS if row is None else loss)
            torch.autograd.backward(output.total / divisor)
        return micro_batch, output._replace(total=output.total.detach())

    def _objective_of(
        self, batch: BatchSummary, rows: Sequence[BatchRow], rounds: int, version: int
    ) -> tuple[Loss, float]:
        if not self._components:
            return self._loss, self._divisor.planned(batch)
        kept = batch.loss_tokens if self._divisor.is_known else self._count_kept(rows, rounds, version)
        return add_up(self._loss, max(self._divisor.final(batch, kept), 1), self._components, batch), 1.0

    @torch.no_grad()
    def _count_kept(self, rows: Sequence[BatchRow], rounds: int, version: int) -> int:
        """Of all ranks' rows."""
        kept = list[Tensor]()
        with self._ranks.exchanging():
            for row in itertools.islice(itertools.chain(rows, itertools.repeat(None)), rounds):
                micro_batch = self._referred(self._micro_batch_of(row, version))
                with nullcontext() if self._replay is None else self._replay.using(micro_batch.routed_experts):
                    output = self._policy(micro_batch, NO_LOSS)
                kept.append(self._of_rewards(output, micro_batch).kept.sum())  # none of an empty row
        return sum(self._ranks.gather(int(torch.stack(kept).sum()) if kept else 0))

    def _add_row(self, row: BatchRow, version: int, sums: LossSums, *, exports: bool) -> RowOutput:
        micro_batch, whole = self.pass_over(row, version)
        output = whole
        if self._components:
            sums.add_components(whole, micro_batch)
            output = self._of_rewards(whole, micro_batch)
        sums.add(output, micro_batch.of_rewards())
        if self._export is not None and exports:
            self._export.add(row, whole, micro_batch.positions, output)
        return RowOutput(micro_batch.positions[row.loss_mask[micro_batch.positions]], output)

    def _referred(self, micro_batch: MicroBatch) -> MicroBatch:
        """With what the reference says of its tokens."""
        if self._reference is None:
            return micro_batch
        return micro_batch.with_column(REFERENCE_LOGPROBS, self._reference.logprobs(micro_batch))

    @torch.no_grad()
    def _of_rewards(self, output: LossOutput, micro_batch: MicroBatch) -> LossOutput:
        """What the loss alone says of its tokens, without components and what they alone bear."""
        tokens = micro_batch.tokens
        columns: tuple[Tensor, ...] = (output.losses, output.kept, output.logprobs, output.entropy)
        if (places := tokens.reward_places) is not None:
            columns = tuple(column[places] for column in columns)
        output = LossOutput(output.total, *columns)
        if (rewarded := tokens.of_rewards()).is_nothing:
            return output
        losses, kept = self._loss(output.logprobs, output.entropy, rewarded)
        return output._replace(losses=losses.where(kept, 0.0), kept=kept)

    def _borne_by_components(self, row: BatchRow) -> list[BoolArray]:
        """[num_tokens of the row]: tokens that bear components, whether or not they bear the loss of rewards."""
        return [borne for component in self._components if (borne := component.bears(row)) is not None]

    def _micro_batch_of(self, row: BatchRow | None, version: int) -> MicroBatch:
        """Of a row, or of an empty one."""
        experts = None if row is None else self._read_experts(row)
        row = row or empty_row()
        borne = self._borne_by_components(row)
        return MicroBatch.of(
            row,
            version,
            self._policy.device,
            experts,
            padded=self._policy.pads_segments,
            others=np.logical_or.reduce(borne) if borne else None,
            group=self._ranks.row_group,
        )

    def _read_experts(self, row: BatchRow) -> ExpertArray | None:
        """What generation recorded for a row, in memory that the next row reuses."""
        if self._open_payload is None:
            return None
        warn = partial(_log.warning, "tokens route themselves, since their recorded experts are gone: %s")
        experts = row.payloads.read(self._open_payload, out=self._experts, on_lost=warn)
        if experts is not None and (self._experts is None or len(experts) > len(self._experts)):
            self._experts = experts
        return experts
