"""The pipeline's stages, one after the other, each as a run calls it and each to be run alone.

    groups ─► score ─► advantages ─► sample ─► form_batch ─► send_batch ─► receive_batch
                                                  └─► record (rollout files, metrics)

A stage leaves its product in the `Pipeline`, where the next one finds it; running a stage again makes it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tailrace.batching import (
    FormedBatch,
    Packing,
    SampledGroup,
    compute_advantages,
    filter_reason,
    form_batch,
    sample_group,
)
from tailrace.batching.slices import in_turns
from tailrace.errors import DataError
from tailrace.records import Batch, Group, OpenPayload, Outcome
from tailrace.replay.scoring import ScoreAgain
from tailrace.reporting.recording import RunRecorder
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import JsonlSink, RolloutWriter
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.phases import phase
from tailrace.transport.batches.queue import BatchReceiver, BatchSender

STEP = 1
_GROUPS_AT_ONCE = 8


@dataclass(slots=True)
class Pipeline:
    """What the stages share."""

    groups: Sequence[Group]
    settings: SchedulingSettings
    sender: BatchSender
    receivers: Sequence[BatchReceiver]
    """One for each data-parallel rank."""
    folder: Path
    """For what a run writes of a step."""
    score_groups: ScoreAgain | None = None
    """None where no rollout can be scored again."""
    open_payload: OpenPayload | None = None
    version: int = field(init=False)
    """That the trainer holds: the newest that sampled anything."""
    trainable: list[Group] = field(default_factory=list)
    sampled: list[SampledGroup] = field(default_factory=list)
    formed: FormedBatch | None = None

    def __post_init__(self) -> None:
        branches = [branch for group in self.groups for rollout in group.rollouts for branch in rollout.branches]
        self.version = max((int(branch.policy_versions.max(initial=0)) for branch in branches), default=0)

    @property
    def stages(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """By name, in the order in which a run calls them."""
        return {
            **({"score": self._score} if self.score_groups is not None else {}),
            "advantages": self._compute_advantages,
            "sample": self._sample,
            "form_batch": self._form,
            "send_batch": self._send,
            "receive_batch": self._receive,
            "record": self._record,
        }

    async def prepare(self, stage: str) -> None:
        """Before a stage runs alone: fill the queue that it reads."""
        if stage == "receive_batch":
            await self._send()

    async def settle(self, stage: str) -> None:
        """After a stage ran alone: empty the queue that it filled, so that it can run again."""
        if stage == "send_batch":
            await self._receive()

    async def _score(self) -> None:
        assert self.score_groups is not None
        with phase("score"):
            await self.score_groups(self.groups)

    async def _compute_advantages(self) -> None:
        """As each group ends in a run, in a turn of its own."""
        self.trainable.clear()
        for group in self.groups:
            with phase("advantages"):
                if all(rollout.reward is not None for rollout in group.rollouts):
                    group.advantages = None
                compute_advantages(group, self.settings.advantage)
                if filter_reason(group, filter_zero_spread=self.settings.leaves_out_equal_rewards) is None:
                    self.trainable.append(group)
            await asyncio.sleep(0)
        if not self.trainable:
            raise DataError("every group was filtered: there is nothing to replay beyond the advantages")

    async def _sample(self) -> None:
        self.sampled.clear()
        for number, group in enumerate(self.trainable, 1):
            with phase("sample"):
                self.sampled.append(sample_group(group, oldest_version=0))
            if number % _GROUPS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _form(self) -> None:
        with phase("form_batch"):
            forming = form_batch(
                self.sampled,
                step=STEP,
                trainer_version=self.version,
                packing=Packing(self.settings.row_tokens, num_ranks=len(self.receivers)),
                whiten_advantages=self.settings.whiten_advantages,
            )
            self.formed = await in_turns(forming)

    async def _send(self) -> None:
        assert self.formed is not None
        with phase("send_batch"):
            await self.sender.send(self.formed.batch)

    async def _receive(self) -> None:
        """To tensors, in a thread, as the trainer does; rank after rank."""
        for receiver in self.receivers:
            with phase("receive_batch"):
                batch = await receiver.receive()
                await asyncio.to_thread(self._to_tensors, batch)
            await receiver.acknowledge(batch.summary.step)

    def _to_tensors(self, batch: Batch) -> None:
        from tailrace.training.rows.micro_batch import MicroBatch

        room = None
        for index in range(batch.num_rows):
            row = batch.row(index)
            with phase("to_tensors", num_bytes=row.token_ids.nbytes):
                experts = None
                if self.open_payload is not None:
                    experts = room = row.payloads.read(self.open_payload, out=room)
                MicroBatch.of(row, self.version, routed_experts=experts)

    async def _record(self) -> None:
        """What a run writes per step: one line of metrics, and its rollouts. Returns once all is on the disk."""
        recorder = RunRecorder()
        outcome = Outcome.trained(STEP)
        with phase("record"):
            entries = []
            for number, group in enumerate(self.groups, 1):
                recorder.group_scored(group)
                for rollout, advantage in zip(group.rollouts, group.advantages or (), strict=True):
                    recorder.rollout_finished(rollout)
                    recorder.rollout_ended(rollout.rollout_id, rollout, outcome)
                    entries.append(RolloutEntry(rollout, outcome, float(np.mean(advantage))))
                if number % _GROUPS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            writer = BackgroundWriter()
            JsonlSink(self.folder / "metrics.jsonl", writer).write({"step": STEP, **recorder.flush()})
            RolloutWriter(self.folder / "rollouts", writer).write(STEP, entries)
            await asyncio.to_thread(writer.close)
