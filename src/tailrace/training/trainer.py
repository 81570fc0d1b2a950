"""From a batch to a new version of the policy: of one process, or of one rank of several that share a model.

    train_step:  checks ─► row by row: forward, loss, backward ─► rescale, clip ─► AdamW ─► version + 1
                              │                                                      └─ again, `steps_per_batch` times
                              └─ nothing trainable, or not finite: no weight changes, the step is skipped

    a batch that an earlier life of the trainer had: the version after it is what it was then, whatever becomes of it

Ranks call the same methods in the same order. Whatever is decided is decided by sums over all ranks, so that all decide
alike. Pure compute: no event loop, no files but checkpoints. The loop that feeds it is `loop.run_trainer`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from tailrace.errors import Diverged, ModelError, TrainingError
from tailrace.models.devices import require_device
from tailrace.models.loading import load_causal_lm, read_tokenizer
from tailrace.records import NOTHING_TRAINABLE, Batch, OpenPayload
from tailrace.tracing.phases import phase
from tailrace.training.checkpoints import files as checkpoints
from tailrace.training.checkpoints.files import StagedCheckpoint
from tailrace.training.checkpoints.snapshots import HostCopies, Snapshot, kept_snapshot
from tailrace.training.losses import Divisor, load_components, load_loss
from tailrace.training.losses.decoupled_ppo import PROXIMAL_LOGPROBS
from tailrace.training.model.acceleration import tune_process
from tailrace.training.model.adapter import Adapter, add_adapter, plain_weights
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.model.reference import Reference, load_frozen
from tailrace.training.model.router_replay import RouterReplay
from tailrace.training.model.sharding import share_out, whole
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.reports.nonfinite_rows import NonFiniteRows
from tailrace.training.reports.token_export import TokenExport
from tailrace.training.reports.utilisation import MemoryGauge, ModelFlops, peak_flops
from tailrace.training.settings.losses import ClippedRatioSettings, DecoupledPpoSettings, OwnLossSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.step.gradients import GradientPasses, RowOutput
from tailrace.training.step.optimizer import learning_rate, make_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

NOT_FINITE = "non_finite"
SKIPPED_BEFORE = "skipped_before"
_GRAD_NORM = "training/grad_norm"
_DECIDING = ("training/loss", _GRAD_NORM)
"""A step that has no finite value of these is skipped."""
_OF_LAST_STEP = ("loss", "grad_norm", "clip_share", "rejected_share", "ratio_max")
"""What is told of the last of several optimizer steps on a batch; all else is of the first."""


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
    token by token; `nonfinite_folder` the rows of steps that were not finite. Raises `ModelError` when the model cannot
    be loaded, or cannot replay routed experts and must (`router_replay = "on"`).
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
        nonfinite_folder: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        torch.set_num_threads(settings.threads)
        tune_process()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if isinstance(settings.loss, ClippedRatioSettings) and settings.loss.correction == "none":
            _log.warning("trainer.loss.correction is none: gradients are biased as soon as generation is stale")
        self.settings = settings
        self.model_name = model_name
        self.max_steps = max_steps
        self.step = 0
        self.version = 0
        self._max_staleness = max_staleness
        self._skipped_in_a_row = 0
        self._ranks = ranks
        open_payload = None if settings.router_replay == "off" else open_payload
        self._adapter: Adapter | None = None
        self._model, self._replay, policy = ranks.agree(lambda: self._load(replays=open_payload is not None))
        self._tokenizer = ranks.agree(lambda: read_tokenizer(model_name) if ranks.rank == 0 else {})
        """For every checkpoint, whatever becomes of a hub or the model's folder."""
        self._flops, self._memory = ModelFlops.of(self._model), MemoryGauge(policy.device)
        self._peak_flops = peak_flops(policy.device, settings.chosen_dtype, settings.peak_flops)
        if isinstance(ranks, JoinedRanks):
            share_out(policy, ranks)
        self._passes = GradientPasses(
            policy,
            load_loss(settings.loss, ranks_per_row=settings.sequence_parallel),
            Divisor.of_loss(settings.loss),
            components=load_components(settings.loss),
            reference=self._load_reference(policy),
            replay=self._replay,
            open_payload=open_payload,
            export=export,
            ranks=ranks,
        )
        self._nonfinite = NonFiniteRows(nonfinite_folder, self._passes, ranks)
        self._optimizer = make_optimizer(self._model, settings)
        self._host_copies: HostCopies | None = None

    def train_step(self, batch: Batch) -> StepResult:
        """Take the optimizer step of `batch`, or `steps_per_batch` of them, for one new version.

        A batch that bears no loss, or whose loss or gradient is not finite, changes no weight: the result says why.
        Where the batch knows what an earlier life of the trainer made of it (`Batch.version_after`), versions are as
        they were: what was skipped is skipped, and what was trained makes a version, of the weights before it where it
        cannot be trained now.

        Raises `TrainingError` for a batch of another step or with tokens beyond the staleness bound, and `Diverged`
        when `max_nonfinite_steps` steps in a row were not finite.
        """
        self._ranks.agree(lambda: self._require_trainable(batch))
        self.step = batch.summary.step
        if batch.version_after == self.version:
            return self._skip(SKIPPED_BEFORE, {})
        result = self._take_step(batch)
        return result if batch.version_after in (None, result.version) else self._renumbered(result)

    def _take_step(self, batch: Batch) -> StepResult:
        """Raises `Diverged`."""
        started_s = time.perf_counter()
        self._memory.begin()
        if not self._passes.teaches(batch.summary, batch.summary.loss_tokens):
            return self._skip(NOTHING_TRAINABLE, {})
        outputs = list[RowOutput]()
        metrics = self._compute_gradients(batch, outputs)
        if _GRAD_NORM not in metrics:
            return self._skip(NOTHING_TRAINABLE, metrics)
        if not _is_finite(metrics):
            return self._skip_not_finite(metrics, self._nonfinite.report(batch, outputs, self.version))
        metrics["training/learning_rate"] = self._update()
        if self.settings.steps_per_batch > 1:
            metrics |= self._step_again(batch, outputs)
        self.version += 1
        passes = metrics.get("training/optimizer_steps", 1.0)
        metrics |= self._performance(batch, time.perf_counter() - started_s, passes)
        return StepResult(self.step, self.version, metrics)

    def snapshot(self, dtype: Literal["float32", "bfloat16"] = "float32", *, stays: bool = False) -> Snapshot:
        """The weights by name, tied ones once, valid until the next snapshot; of several ranks only rank 0 gets them.

        Where it `stays`, they are copies on the model's device that nothing changes, valid for as long as they are
        kept. With `lora.publish = "adapters"` it is the adapter that is trained, and nothing else.

        On a GPU they are copied beside the next step; on a CPU those in float32 are the trainer's own, unless ranks
        gathered them, or adapters were added to copies. With bfloat16, what autocast would not round stays float32:
        vectors (norms, biases), embeddings and the head.
        """
        weights = self._weights_to_publish(dtype)
        with self._ranks.exchanging():
            if self._ranks.rank:
                for _ in weights:  # each is gathered by all ranks
                    pass
                return Snapshot({}, self.version)
            if stays:
                return kept_snapshot(weights, self.version)
            if self._model.device.type == "cuda":
                self._host_copies = self._host_copies or HostCopies(self._model.device, self._optimizer)
                return self._host_copies.take(weights, self.version)
            # Beside an adapter the trainer's own weights stay as they are.
            return Snapshot(dict(weights), self.version, is_copy=self._ranks.size > 1 or self._adapter is not None)

    def _weights_to_publish(self, dtype: Literal["float32", "bfloat16"]) -> Iterator[tuple[str, Tensor]]:
        """Name and weight, in the type that it is published in."""
        if self._adapter is not None and self.settings.lora.publishes_adapters:
            yield from self._adapter.published(getattr(torch, dtype))
            return
        exact = {id(self._model.get_input_embeddings().weight), id(self._model.get_output_embeddings().weight)}
        for name, weight in plain_weights(self._model):
            keeps = weight.own.ndim <= 1 or id(weight.own) in exact
            yield name, weight.whole(torch.float32 if keeps else getattr(torch, dtype))

    def stage_checkpoint(self, folder: Path) -> StagedCheckpoint:
        """Copy all that a checkpoint of the current step needs; its `write` may run beside the next steps.

        Raises `CheckpointError`.
        """
        state = checkpoints.TrainerState(self.step, self.version, self._skipped_in_a_row)
        return checkpoints.stage(
            *(folder, self._model, self._tokenizer, self._optimizer, state), adapter=self._adapter, ranks=self._ranks
        )

    def save_checkpoint(self, folder: Path) -> Path:
        """Write a checkpoint of the current step under `folder`, prune old ones, return its path.

        Raises `CheckpointError`; earlier checkpoints are then as they were.
        """
        return self.write_checkpoint(self.stage_checkpoint(folder))

    def write_checkpoint(self, staged: StagedCheckpoint) -> Path:
        """Write what was staged, prune old checkpoints, return its path. In any thread.

        Raises `CheckpointError`, and `RankLost` where another rank is gone.
        """
        path = staged.write()
        if self._ranks.rank == 0:
            checkpoints.prune_checkpoints(staged.folder, keep=self.settings.keep_checkpoints)
        return path

    def restore(self, checkpoint: Path) -> None:
        """Continue from `checkpoint`, which any number of ranks may have written. Raises `CheckpointError`."""
        state = checkpoints.read_checkpoint(
            checkpoint, self._model, self._optimizer, adapter=self._adapter, ranks=self._ranks
        )
        self.step, self.version, self._skipped_in_a_row = state

    def close(self) -> None:
        """Training is over. Nothing to do for a process of its own; rank 0 of several tells the others."""

    def _require_trainable(self, batch: Batch) -> None:
        summary, ranks = batch.summary, self._ranks
        if (batch.rank, batch.num_ranks) != (ranks.data_rank, ranks.data_size):
            raise TrainingError(
                f"data-parallel rank {ranks.data_rank} of {ranks.data_size} was sent the rows of rank {batch.rank} of "
                f"{batch.num_ranks}"
            )
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
        if batch.version_after not in (None, self.version, self.version + 1):
            raise TrainingError(
                f"step {summary.step} ended with version {batch.version_after} before, and now begins with version "
                f"{self.version}"
            )

    def _load(self, *, replays: bool) -> tuple[PreTrainedModel, RouterReplay | None, PolicyModel]:
        """The model, whole until its last line: each rank keeps its share then."""
        settings = self.settings
        require_device(settings.device, "trainer.device")
        model = load_causal_lm(self.model_name, dtype="float32", device=settings.device)
        replay = self._make_replay(model, replays=replays)
        self._adapter = add_adapter(model, settings.lora, self.model_name)
        policy = PolicyModel(
            model,
            dtype=settings.chosen_dtype,
            head_dtype=settings.chosen_head_dtype,
            native_kernels=settings.native_kernels,
            gradient_checkpointing=settings.gradient_checkpointing,
            offload_activations=settings.offload_activations,
            compiled=settings.compile,
        )
        return model, replay, policy

    def _load_reference(self, policy: PolicyModel) -> Reference | None:
        """The frozen model that the loss asks for, shared out as the policy is, or what lies under its adapter."""
        if (chosen := self.settings.loss.reference_kl) is None:
            return None
        if chosen.estimator == "k1" and chosen.coefficient:
            _log.warning(
                "trainer.loss.reference_kl.estimator is k1: its gradient is 0 on average, and holds nothing back"
            )
        if chosen.model is None and self._adapter is not None:
            return Reference(policy, self._adapter)
        name = chosen.model or self.model_name
        frozen = self._ranks.agree(lambda: load_frozen(name, policy, self.settings))
        if isinstance(self._ranks, JoinedRanks):
            share_out(frozen, self._ranks)
        return Reference(frozen)

    def _make_replay(self, model: PreTrainedModel, *, replays: bool) -> RouterReplay | None:
        if self.settings.router_replay == "on":
            return RouterReplay(model)
        if not replays:
            return None
        try:
            return RouterReplay(model)
        except ModelError as error:
            _log.warning("trainer.router_replay: generation returns routed experts that are of no use, since %s", error)
            return None

    def _compute_gradients(self, batch: Batch, outputs: list[RowOutput], *, exports: bool = True) -> dict[str, float]:
        """Of `batch`, with its metrics; without a gradient norm where nothing of it teaches anything."""
        with phase("gradients"):
            self._optimizer.zero_grad(set_to_none=True)
            metrics, kept = self._passes.add(batch, self.version, outputs, exports=exports).read(batch.summary)
            metrics |= {} if self._replay is None else self._replay.take_metrics(self._ranks)
            if not self._passes.teaches(batch.summary, kept):
                return metrics
            metrics[_GRAD_NORM] = self._scale_gradients(self._passes.rescaling(batch.summary, kept))
        return metrics

    def _step_again(self, batch: Batch, outputs: Sequence[RowOutput]) -> dict[str, float]:
        """The optimizer steps after the first, each over all of `batch`, of which `outputs` are those of the first.

        Metrics are of the last one. A step that is not finite, or of which nothing is kept, ends them; those before it
        stand.
        """
        if isinstance(self.settings.loss, DecoupledPpoSettings | OwnLossSettings):
            batch = _with_proximal_policy(batch, outputs)
        metrics, taken = dict[str, float](), 1
        while taken < self.settings.steps_per_batch:
            again = list[RowOutput]()
            found = self._compute_gradients(batch, again, exports=False)
            if _GRAD_NORM not in found:
                break
            if not _is_finite(found):
                rows = self._nonfinite.report(batch, again, self.version)
                self._forget_routings()
                _log.warning("step %d: optimizer step %d was not taken: %s", self.step, taken + 1, rows)
                break
            self._update()
            taken += 1
            last = {f"training/last_{name}": found.get(f"training/{name}") for name in _OF_LAST_STEP}
            metrics = {name: value for name, value in last.items() if value is not None}
        self._optimizer.zero_grad(set_to_none=True)
        return metrics | {"training/optimizer_steps": float(taken)}

    def _performance(self, batch: Batch, step_s: float, passes: float) -> dict[str, float]:
        """Speed, of all ranks, and the memory of the one that took the most; `passes` went over the batch."""
        own = [self._flops.of_samples(np.diff(batch.sample_offsets)), self._memory.read()]
        flops, memory = zip(*self._ranks.gather(own), strict=True)
        metrics = {
            "training/step_s": step_s,
            "training/tokens_per_s": batch.summary.num_tokens / step_s,
            "training/memory_bytes": max(memory),
        }
        if self._peak_flops is not None:
            # Ranks that share rows have the same ones.
            trained = sum(flops) * passes * self._ranks.data_size / self._ranks.size
            metrics["training/mfu"] = trained / (step_s * len(flops) * self._peak_flops)
        return metrics

    def _scale_gradients(self, factor: float) -> float:
        """By `factor`, the planned divisor over the final one, then down to `max_grad_norm`.

        Returns their norm between the two.
        """
        weights = [weight for weight in self._model.parameters() if weight.grad is not None]
        if factor != 1:
            torch._foreach_mul_([weight.grad for weight in weights], factor)
        with self._ranks.exchanging():
            norm = torch.nn.utils.clip_grad_norm_(weights, self.settings.max_grad_norm, foreach=True)
            return float(whole(norm))

    def _update(self) -> float:
        """One step of the optimizer; returns its learning rate."""
        with phase("optimizer"):
            rate = learning_rate(self.version + 1, self.settings, self.max_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._skipped_in_a_row = 0
        return rate

    def _skip(self, reason: str, metrics: dict[str, float]) -> StepResult:
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(self.step, self.version, metrics, skipped=reason)

    def _renumbered(self, result: StepResult) -> StepResult:
        """Of a step that is skipped, though it made a version before: later batches know versions as they were."""
        self.version += 1
        _log.warning(
            "step %d was trained before and cannot be trained again (%s): version %d has the weights of version %d",
            *(result.step, result.skipped, self.version, result.version),
        )
        return replace(result, version=self.version)

    def _forget_routings(self) -> None:
        """Rows that went through once more, to find those that are not finite, count for no step."""
        if self._replay is not None:
            self._replay.take_metrics(self._ranks)

    def _skip_not_finite(self, metrics: dict[str, float], rows: str) -> StepResult:
        """`rows` says which were not finite."""
        self._forget_routings()
        self._skipped_in_a_row += 1
        loss, norm = metrics["training/loss"], metrics["training/grad_norm"]
        _log.warning("step %d skipped: loss %s, gradient norm %s; %s", self.step, loss, norm, rows)
        if self._skipped_in_a_row >= self.settings.max_nonfinite_steps:
            raise Diverged(
                f"loss or gradient was not finite in {self._skipped_in_a_row} steps in a row (at step {self.step}: "
                f"loss {loss}, gradient norm {norm}; {rows}); lower trainer.learning_rate, or resume from an earlier "
                "checkpoint"
            )
        return self._skip(NOT_FINITE, metrics)


def _is_finite(metrics: Mapping[str, float]) -> bool:
    return all(math.isfinite(metrics[name]) for name in _DECIDING)


def _with_proximal_policy(batch: Batch, outputs: Sequence[RowOutput]) -> Batch:
    """`batch` with what the policy says of its tokens before its first step, of which `outputs` are.

    Waits for the device.
    """
    column = np.zeros(len(batch.token_ids), np.float32)
    if outputs:
        column[batch.loss_mask] = torch.cat([one.output.logprobs for one in outputs]).float().cpu().numpy()
    return replace(batch, columns={**batch.columns, PROXIMAL_LOGPROBS: column})
