"""The parts of a group that are released early, one rollout each; `release` decides, this carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.batching import ZERO_SPREAD
from tailrace.records import Group, Rollout, Task
from tailrace.scheduling.groups import GROUP_TOO_SMALL, GroupPlayer, OpenGroup
from tailrace.scheduling.observer import SchedulerObserver
from tailrace.scheduling.release import EarlyRelease, least_known_siblings, min_known_siblings
from tailrace.scheduling.settings import SchedulingSettings

Push = Callable[[OpenGroup, Group, int], None]
"""A part of a group waits for its batch, and counts for so many rollouts."""


class PartReleaser:
    """Hands finished rollouts over before their group is complete."""

    def __init__(self, settings: SchedulingSettings, observer: SchedulerObserver, push: Push) -> None:
        self._settings, self._observer, self._push = settings, observer, push

    def begin(self, group: OpenGroup) -> None:
        """A group starts."""
        if self._settings.group_release == "early":
            settings, size = self._settings, group.size
            group.release = EarlyRelease(min_known_siblings(settings, size), least_known_siblings(settings, size))

    def learn(self, group: OpenGroup, task: Task) -> None:
        """A rollout has finished: it, and what waited for it, may be trained on before the group is complete."""
        if group.release is not None and group.given_up is None:
            rollout = group.known[-1].rollout
            assert rollout is not None
            reward = Group(group.group_id, task, [rollout]).rewards[0]
            self._release(group, task, group.release.learn(reward))

    def expire(self, group: OpenGroup) -> None:
        """The next batch is the last that takes its oldest tokens: what is known of it goes along."""
        if group.release is not None and group.given_up is None and (released := group.release.expire()):
            rollout = group.known[0].rollout
            assert rollout is not None
            self._release(group, rollout.task, released)

    def close(self, group: OpenGroup, task: Task, rollouts: list[Rollout], player: GroupPlayer) -> None:
        """Every place has come back: what was not released is now, unless there is nothing to compare it with."""
        assert group.release is not None
        if group.given_up is not None:
            return
        if not group.released and len(rollouts) < min(self._settings.min_group_size, group.size):
            player.end_rest(group, GROUP_TOO_SMALL)
            return
        self._release(group, task, group.release.close())
        reason = ZERO_SPREAD if group.release.waiting and self._settings.filter_zero_spread else None
        if reason is not None:
            player.end_rest(group, reason)
        else:
            self._release(group, task, [(number, 0.0) for number in group.release.waiting])
        self._observer.group_scored(Group(group.group_id, task, rollouts), reason)

    def _release(self, group: OpenGroup, task: Task, released: Sequence[tuple[int, float]]) -> None:
        if not released:
            return
        part = Group(group.group_id, task, [], [])
        assert part.advantages is not None
        for number, advantage in released:
            place = group.known[number]
            assert place.rollout is not None
            place.is_released = True
            part.rollouts.append(place.rollout)
            part.advantages.append(advantage)
        self._observer.part_released(part)
        for rollout, own in zip(part.rollouts, part.advantages, strict=True):
            self._push(group, Group(group.group_id, task, [rollout], [own]), 1)
