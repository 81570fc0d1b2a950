"""Sums over what components say of the tokens of a batch; on the device until the step reads them, as `LossSums`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.records import BatchSummary
from tailrace.training.losses import Component, TokenComponent
from tailrace.training.model.head import LossOutput
from tailrace.training.rows.micro_batch import MicroBatch


class ComponentSums:
    """Grows with each micro-batch of a batch."""

    def __init__(self, components: Sequence[Component], environments: Sequence[str]) -> None:
        self._components, self._environments = tuple(components), tuple(environments)
        self._sums: Tensor | None = None
        """[num_environments, num_components, 3], float64: of losses, tokens and measures."""

    def add(self, output: LossOutput, micro_batch: MicroBatch) -> None:
        """Add one micro-batch, all of whose tokens `output` tells of."""
        if not self._components:
            return
        tokens, columns = micro_batch.tokens, list[Tensor]()
        for component in self._components:
            if isinstance(component, TokenComponent):
                losses, _, kept = component.with_derivative(output.logprobs, tokens)
                measures = component.measure(output.logprobs, tokens)
            else:
                assert output.candidate_losses is not None  # of a loss with a component of candidates
                measures, weights, kept = output.candidate_losses, component.weights(tokens), component.weighs(tokens)
                losses = measures if weights is None else measures * weights.to(measures.dtype)
            columns += [losses.where(kept, 0.0).double(), kept.double(), measures.where(kept, 0.0).double()]
        values = torch.stack(columns, dim=1).view(-1, len(self._components), 3)
        if self._sums is None:
            self._sums = values.new_zeros(max(1, len(self._environments)), *values.shape[1:])
        self._sums.index_add_(0, micro_batch.environments, values)

    def as_lists(self) -> list[list[list[float]]]:
        """These sums, for other ranks; waits for the device."""
        sums: list[list[list[float]]] = [] if self._sums is None else self._sums.tolist()
        return sums

    def join(self, gathered: Sequence[list[list[list[float]]]]) -> None:
        """Make these the sums of all that were told, by each rank one."""
        if parts := [sums for sums in gathered if sums]:
            self._sums = torch.tensor(parts, dtype=torch.float64).sum(0)

    def read(self, batch: BatchSummary) -> tuple[dict[str, float], float]:
        """Mean measures by their names in the table of metrics, and what is added to the loss of rewards."""
        added, metrics = 0.0, dict[str, float]()
        each = self.as_lists()
        for number, component in enumerate(self._components if each else ()):
            rows = [environment[number] for environment in each]
            losses, count, measures = (sum(column) for column in zip(*rows, strict=True))
            if factor := component.factor(batch):
                added += factor * losses
            if count:
                metrics[f"training/{component.name}"] = measures / count
            for environment, (_, own_count, own_measures) in zip(self._environments, rows, strict=False):
                if own_count:
                    metrics[f"training/{environment}/{component.name}"] = own_measures / own_count
        return metrics, added
