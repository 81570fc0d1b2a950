"""What the scheduler tells whoever counts, writes and shows."""

from __future__ import annotations

from typing import Protocol

from tailrace.batching import FormedBatch
from tailrace.records import Group, Outcome, Rollout, RolloutId, StepSkipped, StepTrained


class SchedulerObserver(Protocol):
    """Called on the event loop, in order; must return at once and never raise."""

    def rollout_finished(self, rollout: Rollout) -> None:
        """An agent returned."""
        ...

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None:
        """A rollout is terminal. `rollout` is None where it was lost; `message` then says why, for people."""
        ...

    def group_scored(self, group: Group, filter_reason: str | None) -> None:
        """A group has rewards and advantages; with a reason it will not be trained on.

        Where parts of it were released before, it comes last, complete and without advantages; a reason then is that of
        the rest.
        """
        ...

    def part_released(self, part: Group) -> None:
        """Some rollouts of a group have advantages and go on to be trained, before the group is complete."""
        ...

    def batch_sent(self, formed: FormedBatch) -> None:
        """A batch is on its way to the trainer."""
        ...

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        """The trainer is done with a batch."""
        ...
