"""Gradients of a batch: forward and backward of every row of this rank, in as many rounds as every other rank.

row by row: experts ─► micro-batch ─► forward, loss ─► backward ─► sums for metrics
             └─ a rank that has no row left takes part with an empty one, without loss and gradient
"""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from tailrace.records import Batch, BatchRow, ExpertArray, OpenPayload
from tailrace.training.head import LossOutput
from tailrace.training.loss_sums import LossSums
from tailrace.training.losses import Divisor, Loss
from tailrace.training.micro_batch import MicroBatch
from tailrace.training.no_loss import NO_LOSS, empty_row
from tailrace.training.policy_model import PolicyModel
from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.router_replay import RouterReplay
from tailrace.training.token_export import TokenExport

_log = logging.getLogger(__name__)


class GradientPasses:
    """Adds the gradients of batches to those of a policy's weights.

    `open_payload` opens the routed experts that batches refer to, for `replay`; `export` gets every token.
    """

    def __init__(
        self,
        policy: PolicyModel,
        loss: Loss,
        divisor: Divisor,
        *,
        replay: RouterReplay | None = None,
        open_payload: OpenPayload | None = None,
        export: TokenExport | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._policy, self._loss, self._divisor = policy, loss, divisor
        self._replay, self._ranks = replay, ranks
        self._open_payload, self._export = open_payload, export
        self._experts: ExpertArray | None = None

    def add(self, batch: Batch, version: int, outputs: list[LossOutput] | None = None) -> LossSums:
        """Go through this rank's rows with a trainer that holds `version`; the sums are of all ranks.

        The loss is divided by the planned figure of the whole batch. `outputs` gets what became of each of `rows`.
        """
        sums = LossSums(self._loss, self._divisor, batch.origins.environments)
        rows, divisor = self.rows(batch), self._divisor.planned(batch.summary)
        rounds = max(self._ranks.gather(len(rows)))
        with self._ranks.exchanging():
            for row in rows:
                output = self._add_row(row, version, divisor, sums)
                if outputs is not None:
                    outputs.append(output)
            for _ in range(rounds - len(rows)):
                self.pass_over(None, version, divisor)
        if self._export is not None:
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
        return [row for row in rows if row.loss_mask.any()]

    def pass_over(self, row: BatchRow | None, version: int, divisor: float) -> tuple[MicroBatch, LossOutput]:
        """Forward and backward of a row; without one, of an empty one, since each rank takes part in every pass.

        The output's total has no gradient any more.
        """
        if row is None:
            micro_batch = self._micro_batch(empty_row(), version)
        else:
            micro_batch = self._micro_batch(row, version, self._read_experts(row))
        # The backward pass too: where activations are computed twice, it asks the routers again.
        with nullcontext() if self._replay is None else self._replay.using(micro_batch.routed_experts):
            output = self._policy(micro_batch, NO_LOSS if row is None else self._loss)
            torch.autograd.backward(output.total / divisor)
        return micro_batch, output._replace(total=output.total.detach())

    def _add_row(self, row: BatchRow, version: int, divisor: float, sums: LossSums) -> LossOutput:
        micro_batch, output = self.pass_over(row, version, divisor)
        sums.add(output, micro_batch)
        if self._export is not None:
            self._export.add(row, output)
        return output

    def _micro_batch(self, row: BatchRow, version: int, experts: ExpertArray | None = None) -> MicroBatch:
        return MicroBatch.of(row, version, self._policy.device, experts, padded=self._policy.pads_segments)

    def _read_experts(self, row: BatchRow) -> ExpertArray | None:
        """What generation recorded for a row, in memory that the next row reuses."""
        if self._open_payload is None:
            return None
        warn = partial(_log.warning, "tokens route themselves, since their recorded experts are gone: %s")
        experts = row.payloads.read(self._open_payload, out=self._experts, on_lost=warn)
        if experts is not None and (self._experts is None or len(experts) > len(self._experts)):
            self._experts = experts
        return experts
