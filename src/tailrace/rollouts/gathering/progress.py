"""Progress of groups that are gathered without a run: counts, and two progress bars.

rollouts       ━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━  192/256  0:00:07  mean 1.3 s, 3 failed
groups scored  ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━   14/32   0:00:07  mean reward 0.431
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

from tailrace.records import Group


@dataclass(slots=True)
class GroupCounts:
    """Outcomes of rollouts and groups so far; each that has ended is counted under one of them."""

    rollouts_started: int = 0
    rollouts_finished: int = 0
    """Played to their end; whether they could be scored is counted below."""
    rollouts_failed: int = 0
    rollouts_s: float = 0.0
    """How long those that finished took, added up."""
    rewards_failed: int = 0
    """Rollouts that finished and whose own reward failed."""
    groups_started: int = 0
    groups_scored: int = 0
    groups_dropped: int = 0
    """`score_group` returned None, or a list without rollouts."""
    groups_empty: int = 0
    """None of their rollouts came back, so that there was nothing to score."""
    groups_failed: int = 0
    """Their scoring failed and they were dropped."""
    groups_unscored: int = 0
    """Their scoring failed and they were kept without rewards."""
    rewards: int = 0
    reward_sum: float = 0.0

    @property
    def mean_rollout_s(self) -> float | None:
        """How long a rollout takes; None before the first finished."""
        return self.rollouts_s / self.rollouts_finished if self.rollouts_finished else None

    @property
    def mean_reward(self) -> float | None:
        """Of all rollouts in scored groups; None before the first."""
        return self.reward_sum / self.rewards if self.rewards else None

    @property
    def rollouts_over(self) -> int:
        """Finished or failed."""
        return self.rollouts_finished + self.rollouts_failed

    @property
    def groups_over(self) -> int:
        """Scored or not, they have ended."""
        left_out = self.groups_dropped + self.groups_empty + self.groups_failed
        return self.groups_scored + self.groups_unscored + left_out

    def add_scored(self, groups: Iterable[Group]) -> None:
        """The parts of one group that came back from scoring."""
        values = [r.reward.value for group in groups for r in group.rollouts if r.reward is not None]
        self.groups_scored += bool(values)
        self.groups_unscored += not values
        self.rewards += len(values)
        self.reward_sum += sum(values)


class GroupBars(Progress):
    """Two progress bars over counts that change meanwhile: `with GroupBars(counts, ...): ...`.

    Rich draws them in a thread of its own, and they cost the event loop nothing. They are closed however the block
    is left, and then show the final counts.
    """

    def __init__(
        self, counts: GroupCounts, *, groups: int | None, group_size: int, console: Console | None = None
    ) -> None:
        """`groups` is how many there will be; None where that is unknown."""
        self._counts = counts
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[remark]}"),
            console=console,
            refresh_per_second=4,
        )
        rollouts = None if groups is None else groups * group_size
        self._of_rollouts = self.add_task("rollouts", total=rollouts, remark="")
        self._of_groups = self.add_task("groups scored", total=groups, remark="")

    @override
    def stop(self) -> None:
        with suppress(OSError):  # the terminal went away
            super().stop()

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        counts = self._counts
        for bar, completed, remark in (
            (getattr(self, "_of_rollouts", None), counts.rollouts_over, _durations(counts)),
            (getattr(self, "_of_groups", None), counts.groups_over, _rewards(counts)),
        ):
            if bar is not None:
                self.update(bar, completed=completed, remark=remark)
        yield from super().get_renderables()


def _durations(counts: GroupCounts) -> str:
    mean = "" if counts.mean_rollout_s is None else f"mean {counts.mean_rollout_s:.3g} s"
    return _listed(mean, (counts.rollouts_failed, "failed"))


def _rewards(counts: GroupCounts) -> str:
    mean = "" if counts.mean_reward is None else f"mean reward {counts.mean_reward:.3f}"
    dropped = (counts.groups_dropped + counts.groups_empty, "dropped")
    return _listed(mean, dropped, (counts.groups_failed, "failed"), (counts.groups_unscored, "unscored"))


def _listed(mean: str, *counted: tuple[int, str]) -> str:
    return ", ".join(filter(None, [mean, *(f"{count} {what}" for count, what in counted if count)]))
