"""One optimizer step per batch: one process, one model.

    train_step:  checks ─► row by row: forward, loss, backward ─► rescale, clip ─► AdamW ─► version + 1
                              └─ nothing trainable, or not finite: no weight changes, the step is skipped

Pure compute: no event loop, no files but checkpoints. The loop that feeds it is `loop.run_trainer`.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tailrace.errors import Diverged, ModelError, TrainingError
from tailrace.models.loading import load_causal_lm
from tailrace.records import Batch, BatchRow, ExpertArray, OpenPayload
from tailrace.tracing.phases import phase
from tailrace.training import checkpoints
from tailrace.training.acceleration import tune_process
from tailrace.training.loss_sums import LossSums
from tailrace.training.losses import load_loss
from tailrace.training.micro_batch import MicroBatch
from tailrace.training.optimizer import learning_rate, make_optimizer
from tailrace.training.policy_model import PolicyModel
from tailrace.training.router_replay import RouterReplay
from tailrace.training.settings import TrainerSettings
from tailrace.training.snapshots import HostCopies, Snapshot
from tailrace.training.token_export import TokenExport

_log = logging.getLogger(__name__)

NOTHING_TRAINABLE = "nothing_trainable"
NOT_FINITE = "non_finite"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    step: int
    version: int
    """Policy version after the step."""
    metrics: dict[str, float]
    skipped: str | None = None
    """Why no weight changed; None when the step was taken."""


class Trainer:
    """Holds the model, the optimizer and the numbers of step and version.

    Build it in the thread that will call it: torch's number of CPU threads is the calling thread's. `open_payload`
    opens the routed experts that batches refer to; without it none are replayed. `export` takes what is trained on,
    token by token. Raises `ModelError` when the model cannot be loaded, or cannot replay routed experts and must
    (`router_replay = "on"`).
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        model_name: str,
        max_steps: int,
        max_staleness: int,
        seed: int = 0,
        open_payload: OpenPayload | None = None,
        export: TokenExport | None = None,
    ) -> None:
        torch.set_num_threads(settings.threads)
        tune_process()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if settings.loss.name == "clipped_ratio" and settings.loss.correction == "none":
            _log.warning("trainer.loss.correction is none: gradients are biased as soon as generation is stale")
        self.settings = settings
        self.model_name = model_name
        self.max_steps = max_steps
        self.step = 0
        self.version = 0
        self._max_staleness = max_staleness
        self._skipped_in_a_row = 0
        self._model = load_causal_lm(model_name, dtype="float32", device=settings.device)
        self._loss = load_loss(settings.loss)
        self._export = export
        self._open_payload = None if settings.router_replay == "off" else open_payload
        self._replay = self._make_replay()
        self._policy = PolicyModel(
            self._model,
            dtype=settings.dtype,
            head_dtype=settings.head_dtype,
            native_kernels=settings.native_kernels,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
        self._experts: ExpertArray | None = None
        self._optimizer = make_optimizer(self._model, settings)
        self._host_copies: HostCopies | None = None

    def train_step(self, batch: Batch) -> StepResult:
        """Take the optimizer step of `batch`.

        A batch that bears no loss, or whose loss or gradient is not finite, changes no weight: the result says why.
        Raises `TrainingError` for a batch of another step or with tokens beyond the staleness bound, and `Diverged`
        when `max_nonfinite_steps` steps in a row were not finite.
        """
        self._require_trainable(batch)
        started_s = time.perf_counter()
        self.step = batch.summary.step
        if batch.summary.loss_tokens == 0:
            return self._skip(NOTHING_TRAINABLE, {})
        with phase("gradients"):
            metrics, kept = self._accumulate_gradients(batch).read(batch.summary.loss_tokens)
            metrics |= {} if self._replay is None else self._replay.take_metrics()
            if kept == 0:
                return self._skip(NOTHING_TRAINABLE, metrics)
            metrics["training/grad_norm"] = self._scale_gradients(batch.summary.loss_tokens / kept)
        if not all(math.isfinite(metrics[name]) for name in ("training/loss", "training/grad_norm")):
            return self._skip_not_finite(metrics)
        with phase("optimizer"):
            metrics["training/learning_rate"] = self._update()
        step_s = time.perf_counter() - started_s
        metrics["training/step_s"] = step_s
        metrics["training/tokens_per_s"] = batch.summary.num_tokens / step_s
        return StepResult(self.step, self.version, metrics)

    def snapshot(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Snapshot:
        """The weights by name, tied ones once, valid until the next snapshot. On a GPU they are copied beside the next
        step; on a CPU those in float32 are the trainer's own.

        With bfloat16, what autocast would not round stays float32: vectors (norms, biases), embeddings and the head.
        """
        if self._model.device.type == "cuda":
            self._host_copies = self._host_copies or HostCopies(self._model.device, self._optimizer)
            return self._host_copies.take(self._weights_to_publish(dtype), self.version)
        return Snapshot({name: weight.to(to) for name, weight, to in self._weights_to_publish(dtype)}, self.version)

    def _weights_to_publish(self, dtype: Literal["float32", "bfloat16"]) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        """Name, parameter, and the type that it is published in."""
        exact = {id(self._model.get_input_embeddings().weight), id(self._model.get_output_embeddings().weight)}
        for name, parameter in self._model.named_parameters():
            keeps = parameter.ndim == 1 or id(parameter) in exact
            yield name, parameter.detach(), torch.float32 if keeps else getattr(torch, dtype)

    def save_checkpoint(self, folder: Path) -> Path:
        """Write a checkpoint of the current step under `folder`, prune old ones, return its path.

        Raises `CheckpointError`; earlier checkpoints are then as they were.
        """
        state = checkpoints.TrainerState(
            step=self.step,
            version=self.version,
            optimizer=self._optimizer.state_dict(),
            skipped_in_a_row=self._skipped_in_a_row,
        )
        path = checkpoints.write_checkpoint(folder, self._model, self.model_name, state)
        checkpoints.prune_checkpoints(folder, keep=self.settings.keep_checkpoints)
        return path

    def restore(self, checkpoint: Path) -> None:
        """Continue from `checkpoint`. Raises `CheckpointError`."""
        state = checkpoints.read_checkpoint(checkpoint, self._model)
        try:
            self._optimizer.load_state_dict(state.optimizer)
        except (ValueError, KeyError) as error:
            raise checkpoints.not_of_this_model(checkpoint, error) from error
        self.step, self.version = state.step, state.version
        self._skipped_in_a_row = state.skipped_in_a_row

    def _require_trainable(self, batch: Batch) -> None:
        summary = batch.summary
        if summary.step != self.step + 1:
            raise TrainingError(f"the trainer has done step {self.step} and was sent the batch of step {summary.step}")
        versions = batch.policy_versions[batch.loss_mask]
        oldest = int(versions.min(initial=self.version))
        newest = int(versions.max(initial=self.version))
        if newest > self.version:
            raise TrainingError(f"step {summary.step}: tokens of version {newest} before the trainer reached it")
        if self.version - oldest > self._max_staleness:
            raise TrainingError(
                f"step {summary.step}: tokens of version {oldest} at version {self.version} are "
                f"{self.version - oldest} versions old; max_staleness is {self._max_staleness}"
            )

    def _accumulate_gradients(self, batch: Batch) -> LossSums:
        """Forward and backward of every row; the loss is divided by the planned number of loss tokens."""
        self._optimizer.zero_grad(set_to_none=True)
        sums = LossSums(self._loss)
        for row in self._rows(batch):
            micro_batch = MicroBatch.of(
                row,
                self.version,
                self.settings.device,
                self._read_experts(row),
                padded=self._policy.pads_segments,
            )
            # The backward pass too: where activations are computed twice, it asks the routers again.
            with nullcontext() if self._replay is None else self._replay.using(micro_batch.routed_experts):
                output = self._policy(micro_batch, self._loss)
                torch.autograd.backward(output.total / batch.summary.loss_tokens)
            sums.add(output, micro_batch)
            if self._export is not None:
                self._export.add(row, output)
        if self._export is not None:
            self._export.end_step(self.step)
        return sums

    def _rows(self, batch: Batch) -> Iterator[BatchRow]:
        """Those with tokens that bear loss; each sample is a row where the model does not pack."""
        edges = batch.row_offsets.tolist() if self._policy.packs else range(len(batch.sample_offsets))
        rows = (batch.samples(first, last) for first, last in itertools.pairwise(edges))
        return (row for row in rows if row.loss_mask.any())

    def _make_replay(self) -> RouterReplay | None:
        if self.settings.router_replay == "on":
            return RouterReplay(self._model)
        if self._open_payload is None:
            return None
        try:
            return RouterReplay(self._model)
        except ModelError as error:
            _log.warning("trainer.router_replay: generation returns routed experts that are of no use, since %s", error)
            return None

    def _read_experts(self, row: BatchRow) -> ExpertArray | None:
        """What generation recorded for a row, in memory that the next row reuses."""
        if self._open_payload is None:
            return None
        warn = partial(_log.warning, "tokens route themselves, since their recorded experts are gone: %s")
        experts = row.payloads.read(self._open_payload, out=self._experts, on_lost=warn)
        if experts is not None and (self._experts is None or len(experts) > len(self._experts)):
            self._experts = experts
        return experts

    def _scale_gradients(self, factor: float) -> float:
        """To the mean over kept tokens (`factor` is planned over kept), then down to `max_grad_norm`.

        Returns their norm between the two.
        """
        weights = [weight for weight in self._model.parameters() if weight.grad is not None]
        if factor != 1:
            torch._foreach_mul_([weight.grad for weight in weights], factor)
        return float(torch.nn.utils.clip_grad_norm_(weights, self.settings.max_grad_norm, foreach=True))

    def _update(self) -> float:
        """One step of AdamW; returns its learning rate."""
        rate = learning_rate(self.version + 1, self.settings, self.max_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self._skipped_in_a_row = 0
        return rate

    def _skip(self, reason: str, metrics: dict[str, float]) -> StepResult:
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(self.step, self.version, metrics, skipped=reason)

    def _skip_not_finite(self, metrics: dict[str, float]) -> StepResult:
        self._skipped_in_a_row += 1
        loss, norm = metrics["training/loss"], metrics["training/grad_norm"]
        _log.warning("step %d skipped: loss %s, gradient norm %s", self.step, loss, norm)
        if self._skipped_in_a_row >= self.settings.max_nonfinite_steps:
            raise Diverged(
                f"loss or gradient was not finite in {self._skipped_in_a_row} steps in a row (at step {self.step}: "
                f"loss {loss}, gradient norm {norm}); lower trainer.learning_rate, or resume from an earlier checkpoint"
            )
        return self._skip(NOT_FINITE, metrics)
