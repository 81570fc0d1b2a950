"""What a simulated run is measured by, from below: tokens that engines sampled, and what became of them.

It does not believe the scheduler's own accounts: waste is what was sampled, less what was trained, less what is on its
way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from tailrace.batching import STALE, FormedBatch
from tailrace.records import (
    Completion,
    Generate,
    GenerationRequest,
    Group,
    OnChunk,
    Outcome,
    Rollout,
    RolloutId,
    StepSkipped,
    StepTrained,
    TaskId,
    TerminalState,
)
from tailrace.reporting.recording import BiasMeter
from tailrace.simulation.lengths import LengthSource


class MeteredGenerate(Generate):
    """Over another one, and counts."""

    def __init__(self, generate: Generate, lengths: LengthSource) -> None:
        self.asked_completions = 0
        self.asked_tokens = 0
        """Full lengths of all completions that were begun."""
        self.open_tokens: Counter[str] = Counter()
        """Tokens of finished completions, by rollouts that are not terminal."""
        self._generate, self._lengths = generate, lengths

    @override
    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        if request.prefix is None:
            self.asked_completions += 1
            length = self._lengths.draw(request.group_id.partition("#")[0], request.request_id)
            self.asked_tokens += min(length, request.sampling.max_tokens)
        completion = await self._generate(request, on_chunk)
        if request.owner is not None:
            self.open_tokens[request.owner] += completion.num_tokens - request.prefix_tokens
        return completion


@dataclass(slots=True)
class Totals:
    """Sums since the start of a run; the difference of two is what happened in between."""

    time_s: float = 0.0
    sampled_tokens: int = 0
    on_the_way_tokens: int = 0
    """Sampled, of rollouts that are not terminal."""
    asked_completions: int = 0
    asked_tokens: int = 0
    trained_rollouts: int = 0
    trained_groups: int = 0
    trained_tokens: int = 0
    """Completion tokens of trained rollouts, masked ones included."""
    batch_tokens: int = 0
    """All tokens of trained batches, prompts included."""
    loss_tokens: int = 0
    masked_tokens: int = 0
    """Stale ones in trained rollouts."""
    wholly_stale_tokens: int = 0
    """Of rollouts whose every token was stale as their group was trained on."""
    staleness_sum: int = 0
    trainer_idle_s: float = 0.0

    def since(self, earlier: Totals) -> Totals:
        """What was added."""
        return Totals(*(getattr(self, name) - getattr(earlier, name) for name in Totals.__slots__))

    @property
    def ended_tokens(self) -> int:
        """Sampled, of rollouts that are terminal."""
        return self.sampled_tokens - self.on_the_way_tokens


class SimulationObserver:
    """Implements `SchedulerObserver`. Keeps totals, and what histograms are made of."""

    def __init__(
        self,
        generate: MeteredGenerate,
        *,
        warmup_steps: int,
        on_step: Callable[[StepTrained | StepSkipped], None],
    ) -> None:
        """`on_step` is told of a step once it is counted."""
        self.bias = BiasMeter(warmup_steps=warmup_steps)
        self.totals = Totals()
        self.staleness: Counter[int] = Counter()
        """Tokens that bore loss, by their staleness, after warm-up."""
        self.outcomes: Counter[str] = Counter()
        """Rollouts by terminal state and reason."""
        self.ended: dict[RolloutId, TerminalState] = {}
        self.ended_twice: list[RolloutId] = []
        self.trained_tasks: dict[int, set[TaskId]] = {}
        """By the step that trained on them."""
        self.journal: list[str] = []
        """Every event, where `keeps_journal`."""
        self.keeps_journal = False
        self._generate, self._warmup_steps, self._on_step = generate, warmup_steps, on_step

    def rollout_finished(self, rollout: Rollout) -> None:
        """See `SchedulerObserver`."""
        self.bias.finished(rollout)
        self._note("finished", rollout.rollout_id, rollout.num_completion_tokens)

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        """See `SchedulerObserver`."""
        self._note("ended", rollout_id, outcome)
        if rollout_id in self.ended:
            self.ended_twice.append(rollout_id)
        self.ended[rollout_id] = outcome.state
        tokens = self._generate.open_tokens.pop(rollout_id, 0)
        self.outcomes[f"{outcome.state}({outcome.reason})" if outcome.reason else outcome.state] += 1
        if rollout is not None:
            self.bias.ended(rollout, outcome)
        if outcome.state is TerminalState.TRAINED:
            self.totals.trained_rollouts += 1
            self.totals.trained_tokens += tokens
        elif outcome == Outcome.filtered(STALE):
            self.totals.wholly_stale_tokens += tokens

    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        """See `SchedulerObserver`."""
        self._note("scored", group.group_id, filter_reason)

    def part_released(self, part: Group) -> None:
        """See `SchedulerObserver`."""
        self._note("released", part.group_id, part.advantages)

    def batch_sent(self, formed: FormedBatch) -> None:
        """See `SchedulerObserver`."""
        self.bias.sent(formed.batch.summary)
        self._note("sent", formed.batch.summary)

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        """See `SchedulerObserver`."""
        self._note("step", event)
        if isinstance(event, StepTrained):
            self._count(formed, event)
        self._on_step(event)

    def _count(self, formed: FormedBatch, event: StepTrained) -> None:
        batch, totals = formed.batch, self.totals
        self.trained_tasks[event.step] = {group.group.task.task_id for group in formed.groups}
        staleness = {event.version - 1 - version: count for version, count in batch.loss_versions().items()}
        trained = sum(rollout.num_completion_tokens for group in formed.groups for rollout in group.trained)
        totals.trained_groups += len(formed.groups)
        totals.batch_tokens += batch.summary.num_tokens
        totals.loss_tokens += batch.summary.loss_tokens
        totals.masked_tokens += trained - batch.summary.loss_tokens
        totals.staleness_sum += sum(age * count for age, count in staleness.items())
        if event.step > self._warmup_steps:
            self.staleness.update(staleness)

    def _note(self, *what: object) -> None:
        if self.keeps_journal:
            self.journal.append(f"{asyncio.get_running_loop().time()!r} {' '.join(map(str, what))}")
