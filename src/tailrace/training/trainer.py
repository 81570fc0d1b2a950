"""A batch in, a new policy version out: one process, one model.

    train_step:  checks ─► row by row: forward, loss, backward ─► rescale, clip ─► AdamW ─► version + 1
                              └─ nothing trainable, or not finite: no weight changes, the step is skipped

Pure compute: no event loop, no files but checkpoints. The loop that feeds it is `loop.run_trainer`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tailrace.errors import Diverged, ModelError, PayloadLost, TrainingError
from tailrace.models.loading import load_causal_lm
from tailrace.records import Batch, BatchRow, ExpertArray, OpenPayload
from tailrace.tracing.phases import phase
from tailrace.training import checkpoints
from tailrace.training.acceleration import tune_process
from tailrace.training.loss_sums import LossSums, LossTotals
from tailrace.training.losses import load_loss
from tailrace.training.micro_batch import MicroBatch, split_samples
from tailrace.training.optimizer import learning_rate, make_optimizer
from tailrace.training.policy_model import PolicyModel
from tailrace.training.router_replay import RouterReplay
from tailrace.training.settings import TrainerSettings
from tailrace.training.snapshots import HostCopies, Snapshot

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

    Build it in the thread that will call it: the number of CPU threads is a property of the calling thread. Raises
    `ModelError` when the model cannot be loaded, or cannot replay routed experts and must (`router_replay = "on"`).
    `open_payload` opens the routed experts that batches refer to; without it none are replayed.
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
    ) -> None:
        torch.set_num_threads(settings.threads)
        tune_process()
        _seed_everything(seed)
        if settings.loss.name == "clipped_ratio" and settings.loss.correction == "none":
            _log.warning("trainer.loss.correction is none: gradients are biased as soon as generation is stale")
        self.settings = settings
        self.model_name = model_name
        self.step = 0
        self.version = 0
        self._max_steps = max_steps
        self._max_staleness = max_staleness
        self._skipped_in_a_row = 0
        self._model = load_causal_lm(model_name, dtype="float32", device=settings.device)
        self._loss = load_loss(settings.loss)
        self._open_payload = None if settings.router_replay == "off" else open_payload
        self._policy = PolicyModel(
            self._model,
            dtype=settings.dtype,
            head_dtype=settings.head_dtype,
            native_kernels=settings.native_kernels,
            gradient_checkpointing=settings.gradient_checkpointing,
            replay=self._make_replay(),
        )
        self._experts: ExpertArray | None = None
        self._optimizer = make_optimizer(self._model, settings)
        self._host_copies: HostCopies | None = None

    @property
    def max_steps(self) -> int:
        """Steps after which training is finished."""
        return self._max_steps

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
            totals = self._accumulate_gradients(batch)
            kept = batch.summary.loss_tokens - totals.rejected
            metrics = totals.metrics(max(kept, 1)) | self._policy.take_replay_counts().metrics()
            if kept == 0:
                return self._skip(NOTHING_TRAINABLE, metrics)
            self._rescale_gradients(batch.summary.loss_tokens / kept)
            metrics["training/grad_norm"] = self._clip_gradients()
        if not all(math.isfinite(metrics[name]) for name in ("training/loss", "training/grad_norm")):
            return self._skip_not_finite(metrics)
        with phase("optimizer"):
            metrics["training/learning_rate"] = self._update()
        step_s = time.perf_counter() - started_s
        metrics["training/step_s"] = step_s
        metrics["training/tokens_per_s"] = batch.summary.num_tokens / step_s
        return StepResult(self.step, self.version, metrics)

    def model_state_dict(self, dtype: Literal["float32", "bfloat16"] = "float32") -> dict[str, Tensor]:
        """The weights by name, tied ones once, on the CPU. In float32 they may be the trainer's own: copy to keep.

        With bfloat16, what autocast would not round stays float32: vectors (norms, biases), embeddings and the head.
        """
        return {name: weight.to(device="cpu", dtype=to) for name, weight, to in self._weights_to_publish(dtype)}

    def snapshot(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Snapshot:
        """The same weights, on a GPU copied beside the next step; give them to a store before the next snapshot."""
        if self._model.device.type != "cuda":
            return Snapshot(self.model_state_dict(dtype), self.version)
        if self._host_copies is None:
            self._host_copies = HostCopies(self._model.device, self._optimizer)
        return self._host_copies.take(self._weights_to_publish(dtype), self.version)

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
        if not len(versions):
            return
        oldest, newest = int(versions.min()), int(versions.max())
        if newest > self.version:
            raise TrainingError(f"step {summary.step}: tokens of version {newest} before the trainer reached it")
        if self.version - oldest > self._max_staleness:
            raise TrainingError(
                f"step {summary.step}: tokens of version {oldest} at version {self.version} are "
                f"{self.version - oldest} versions old; max_staleness is {self._max_staleness}"
            )

    def _accumulate_gradients(self, batch: Batch) -> LossTotals:
        """Forward and backward of every row; the loss is normalised by the planned number of loss tokens."""
        self._optimizer.zero_grad(set_to_none=True)
        sums = LossSums(self._loss)
        denominator = float(batch.summary.loss_tokens)
        for index in range(batch.num_rows):
            row = batch.row(index)
            for piece in [row] if self._policy.packs else split_samples(row):
                if piece.loss_mask.any():
                    experts = self._read_experts(piece)
                    micro_batch = MicroBatch.of(
                        piece, self.version, self.settings.device, experts, padded=self._policy.pads_segments
                    )
                    self._train_on(micro_batch, denominator, sums)
        return sums.read()

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
        """What generation recorded for a row, in memory that the next row's will take."""
        if self._open_payload is None:
            return None
        experts = row.payloads.read(self._open_payload, out=self._experts, on_lost=_tell_of_lost_payload)
        if experts is not None and (self._experts is None or len(experts) > len(self._experts)):
            self._experts = experts
        return experts

    def _train_on(self, micro_batch: MicroBatch, denominator: float, sums: LossSums) -> None:
        with self._policy.replaying(micro_batch):
            output = self._policy(micro_batch, self._loss)
            torch.autograd.backward(output.total / denominator)
        sums.add(output, micro_batch)

    def _rescale_gradients(self, factor: float) -> None:
        """To the mean over the tokens that the loss kept; `factor` is planned over kept tokens."""
        if factor != 1:
            torch._foreach_mul_([weight.grad for weight in self._model.parameters() if weight.grad is not None], factor)

    def _clip_gradients(self) -> float:
        """Scale gradients down to `max_grad_norm`; returns their norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.settings.max_grad_norm, foreach=True)
        return float(norm)

    def _update(self) -> float:
        """One step of AdamW; returns its learning rate."""
        rate = learning_rate(self.version + 1, self.settings, self._max_steps)
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


def _tell_of_lost_payload(lost: PayloadLost) -> None:
    _log.warning("tokens route themselves, since their recorded experts are gone: %s", lost)


def _seed_everything(seed: int) -> None:
    """Of this process: random, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
