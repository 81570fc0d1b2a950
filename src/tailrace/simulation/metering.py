"""What a simulated run is measured by, from below: tokens that engines sampled, and what happened to them.

It does not rely on the scheduler's own accounts: waste is what was sampled, less what was trained, less what belongs to
rollouts that have not ended.
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
    GroupId,
    OnChunk,
    Outcome,
    Rollout,
    RolloutId,
    StepSkipped,
    StepTrained,
    TaskId,
    TerminalState,
)
from tailrace.scheduling import SchedulerObserver
from tailrace.simulation.lengths import LengthSource


@dataclass(slots=True)
class Totals:
    """Sums since the start of a run; the difference of two is what happened in between."""

    time_s: float = 0.0
    sampled_tokens: int = 0
    open_tokens: int = 0
    """Sampled, of rollouts that are not terminal."""
    asked_completions: int = 0
    """Completions that were begun."""
    asked_tokens: int = 0
    """Their full lengths."""
    trained_rollouts: int = 0
    trained_groups: int = 0
    trained_tokens: int = 0
    """Completion tokens of trained rollouts, masked ones included."""
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
        return self.sampled_tokens - self.open_tokens


class MeteredGenerate(Generate):
    """Counts what another `Generate` is asked for and returns."""

    def __init__(self, generate: Generate, lengths: LengthSource) -> None:
        self.totals = Totals()
        self.open_tokens: Counter[str] = Counter()
        """Tokens of finished completions, by rollouts that are not terminal."""
        self._generate, self._lengths = generate, lengths

    @override
    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        if request.prefix is None:
            self.totals.asked_completions += 1
            length = self._lengths.draw(request.group_id.partition("#")[0], request.request_id)
            self.totals.asked_tokens += min(length, request.sampling.max_tokens)
        completion = await self._generate(request, on_chunk)
        if request.owner is not None:
            self.open_tokens[request.owner] += completion.num_tokens - request.prefix_tokens
        return completion


class SimulationObserver(SchedulerObserver):
    """Adds to the totals of `generate`, and keeps what histograms and the fault search need."""

    def __init__(
        self,
        generate: MeteredGenerate,
        *,
        warmup_steps: int,
        on_step: Callable[[StepTrained | StepSkipped], None],
        keep_journal: bool,
    ) -> None:
        """`on_step` is called with a step's end once it is counted."""
        self.staleness: Counter[int] = Counter()
        """Tokens that bore loss, by their staleness, after warm-up."""
        self.outcomes: Counter[str] = Counter()
        """Rollouts by terminal state and reason."""
        self.ended: dict[RolloutId, TerminalState] = {}
        self.ended_twice: list[RolloutId] = []
        self.trained_tasks: dict[int, set[TaskId]] = {}
        """By the step that trained on them."""
        self.batch_groups: list[list[GroupId]] = []
        """Of every batch that was sent: the group that each of its groups, or parts of one, was started as."""
        self.journal: list[str] = []
        """Every event, where it is kept."""
        self._generate, self._totals, self._keeps_journal = generate, generate.totals, keep_journal
        self._warmup_steps, self._on_step = warmup_steps, on_step

    @override
    def rollout_finished(self, rollout: Rollout) -> None:
        self._note("finished", rollout.rollout_id, rollout.num_completion_tokens)

    @override
    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        self._note("ended", rollout_id, outcome)
        if rollout_id in self.ended:
            self.ended_twice.append(rollout_id)
        self.ended[rollout_id] = outcome.state
        tokens = self._generate.open_tokens.pop(rollout_id, 0)
        self.outcomes[f"{outcome.state}({outcome.reason})" if outcome.reason else outcome.state] += 1
        if outcome.state is TerminalState.TRAINED:
            self._totals.trained_rollouts += 1
            self._totals.trained_tokens += tokens
        elif outcome == Outcome.filtered(STALE):
            self._totals.wholly_stale_tokens += tokens

    @override
    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        self._note("scored", group.group_id, filter_reason)

    @override
    def part_released(self, part: Group) -> None:
        self._note("released", part.group_id, part.advantages)

    @override
    def batch_sent(self, formed: FormedBatch) -> None:
        self._note("sent", formed.batch.summary)
        self.batch_groups.append([group.group.rollouts[0].group_id for group in formed.groups])

    @override
    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        self._note("step", event)
        if isinstance(event, StepTrained):
            self._count(formed, event)
        self._on_step(event)

    def _count(self, formed: FormedBatch, event: StepTrained) -> None:
        batch, totals = formed.batch, self._totals
        self.trained_tasks[event.step] = {group.group.task.task_id for group in formed.groups}
        staleness = {event.version - 1 - version: count for version, count in batch.loss_versions().items()}
        trained = sum(rollout.num_completion_tokens for group in formed.groups for rollout in group.trained)
        totals.trained_groups += len(formed.groups)
        totals.loss_tokens += batch.summary.loss_tokens
        totals.masked_tokens += trained - batch.summary.loss_tokens
        totals.staleness_sum += sum(age * count for age, count in staleness.items())
        if event.step > self._warmup_steps:
            self.staleness.update(staleness)

    def _note(self, *what: object) -> None:
        if self._keeps_journal:
            self.journal.append(f"{asyncio.get_running_loop().time()!r} {' '.join(map(str, what))}")
