"""Training finished rollouts before their group's stragglers: which, when, and with which advantage. Pure.

A rollout's advantage is its reward less the mean reward of the siblings known when it is released (leave-one-out:
Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free", equation 8). Nothing that happens
later changes an advantage that was given out. What this does to the gradient is derived in docs/scheduling.md.
"""

from __future__ import annotations

import math

from tailrace.scheduling.settings import SchedulingSettings


class EarlyRelease:
    """One group's. Rollouts are numbered in the order in which they became known.

    >>> release = EarlyRelease(min_known_siblings=2)
    >>> release.learn(1.0), release.learn(1.0), release.learn(1.0)  # too few, and then all equal
    ([], [], [])
    >>> release.learn(0.0)  # doctest: +ELLIPSIS
    [(0, 0.333...), (1, 0.333...), (2, 0.333...), (3, -1.0)]
    >>> release.learn(1.0)
    [(4, 0.25)]
    """

    def __init__(self, min_known_siblings: int, least_known_siblings: int = 1) -> None:
        """The first release needs `min_known_siblings` of each rollout, or the least once the group expires."""
        self._min_known_siblings, self._least_known_siblings = min_known_siblings, least_known_siblings
        self._rewards: list[float] = []
        self.waiting: list[int] = []
        """Numbers of the rollouts that are known and not released."""

    @classmethod
    def of_group(cls, settings: SchedulingSettings, group_size: int) -> EarlyRelease | None:
        """Of a group that starts; None where groups are trained on together."""
        if settings.group_release != "early":
            return None
        least = max(1, min(settings.min_group_size, group_size) - 1)
        chosen = group_size // 2 if settings.min_known_siblings is None else settings.min_known_siblings
        return cls(max(chosen, least), least)

    def learn(self, reward: float) -> list[tuple[int, float]]:
        """One more rollout is known; (number, advantage) of those that are released now.

        The first release waits until every rollout has `min_known_siblings` siblings and not all rewards are equal.
        """
        self.waiting.append(len(self._rewards))
        self._rewards.append(reward)
        if len(self._rewards) <= self._min_known_siblings:
            return []
        return self._release()

    def expire(self) -> list[tuple[int, float]]:
        """No later batch takes the group whole; (number, advantage) of those that are released now.

        >>> release = EarlyRelease(min_known_siblings=7)
        >>> release.learn(1.0), release.learn(0.0)
        ([], [])
        >>> release.expire(), release.learn(0.5)
        ([(0, 1.0), (1, -1.0)], [(2, 0.0)])
        """
        self._min_known_siblings = self._least_known_siblings
        return self._release() if len(self._rewards) > self._min_known_siblings else []

    def close(self) -> list[tuple[int, float]]:
        """No more rollouts will be known; (number, advantage) of those that are released now.

        What is still waiting afterwards has siblings of its own reward only, or none.
        """
        return self._release() if len(self._rewards) > 1 else []

    def _release(self) -> list[tuple[int, float]]:
        if min(self._rewards) == max(self._rewards):
            return []
        others = len(self._rewards) - 1
        total = math.fsum(reward / others for reward in self._rewards)
        released = [
            (number, self._rewards[number] - (total - self._rewards[number] / others)) for number in self.waiting
        ]
        self.waiting.clear()
        return released
