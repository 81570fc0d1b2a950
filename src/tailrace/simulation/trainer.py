"""The trainer, modelled: batches in, versions out, each step as long as the plan says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from tailrace.errors import TrainingError
from tailrace.records import PlannedBatch, StepSkipped, StepTrained
from tailrace.simulation.settings import ModelledTrainerSettings

StepEnded: TypeAlias = StepTrained | StepSkipped
Hiccup: TypeAlias = Callable[[int], float]
"""Seconds by which a step is delayed, by its number: a restart, and the replay of what was not yet saved."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a trainer and its scheduler can start again."""

    step: int = 0
    version: int = 0
    scheduler_state: bytes = b""
    resumes: int = 0
    """Starts before the one that begins here."""


class ModelledTrainer:
    """Trains on batches in order. It asserts order and staleness bound, as the real one does."""

    def __init__(
        self,
        settings: ModelledTrainerSettings,
        *,
        max_staleness: int,
        publish: Callable[[int], Awaitable[None]],
        on_step: Callable[[StepEnded], None],
        step: int = 0,
        version: int = 0,
        skips: Callable[[int], bool] = lambda step: False,
        hiccup: Hiccup = lambda step: 0.0,
    ) -> None:
        """`publish` sends each new version; `step` and `version` are those that an earlier run ended with."""
        self.step, self.version = step, version
        self.idle_s = 0.0
        """Waited for a batch."""
        self.is_training = False
        """Whether it has a batch."""
        self._settings, self._max_staleness = settings, max_staleness
        self._publish, self._on_step, self._skips, self._hiccup = publish, on_step, skips, hiccup
        self._batches: asyncio.Queue[PlannedBatch] = asyncio.Queue()

    async def send(self, batch: PlannedBatch) -> None:
        """Hand a batch over."""
        self._batches.put_nowait(batch)

    async def run(self) -> None:
        """Train on batches until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            since_s = clock()
            batch = await self._batches.get()
            self.idle_s += clock() - since_s
            self._require_trainable(batch)
            step, tokens = batch.summary.step, batch.summary.num_tokens
            del batch  # as a run's trainer, which has a copy: who freed it here would stall the loop of all others
            self.is_training = True
            await self._train(step, tokens)
            self.is_training = False

    async def _train(self, step: int, tokens: int) -> None:
        """One step; its weights are sent before its end is reported."""
        settings = self._settings
        await asyncio.sleep(settings.train_s + settings.train_s_per_token * tokens + self._hiccup(step))
        self.step = step
        if self._skips(step):
            self._on_step(StepSkipped(epoch="", step=step, version=self.version, reason="not_finite"))
            return
        self.version += 1
        await self._publish(self.version)
        self._on_step(StepTrained(epoch="", step=step, version=self.version, metrics={}))
        if settings.sync_holds_trainer:
            await asyncio.sleep(settings.sync_s)

    def _require_trainable(self, batch: PlannedBatch) -> None:
        if batch.summary.step != self.step + 1:
            raise TrainingError(f"the batch of step {batch.summary.step} came after step {self.step}")
        loss_versions = batch.loss_versions()
        if not loss_versions:
            raise TrainingError(f"the batch of step {batch.summary.step} bears no loss")
        if max(loss_versions) > self.version:
            raise TrainingError(f"step {batch.summary.step} was sampled by a version that was never trained")
        if (age := self.version - min(loss_versions)) > self._max_staleness:
            raise TrainingError(
                f"step {batch.summary.step} trains on tokens that are {age} versions old; max_staleness is "
                f"{self._max_staleness}"
            )
