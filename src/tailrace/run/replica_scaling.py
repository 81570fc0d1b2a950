"""How many generators a run on a cluster is to have, from what its rollouts fill. Pure: figures in, a number out.

    slots full for `grow_after_s`, nobody on the way         →  half as many again as serve
    one less would do for `shrink_after_s`, with some room   →  one less
    the cluster had no room for the last one                 →  no other for a while

Admission keeps slots full as long as the staleness budget lets it. So full slots say that the run waits for generation,
and idle ones that generators wait for the trainer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from tailrace.generation.settings import ReplicaSettings

LOOK_S = 1.0
"""Between two looks."""
ASK_AGAIN_S = 60.0
"""After the cluster had no room."""
_FULL = 0.9
"""Of the slots: rollouts that end leave some free for a moment."""
_WOULD_DO = 0.8
"""Of the slots that would be left, in the mean: what is let go should not be missed at once."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is seen at one look."""

    rollouts: int
    """That run."""
    slots: int
    """Of the generators that serve."""
    serving: int
    on_the_way: int = 0
    """Generators that start, or wait for a machine, or leave: those have theirs until they are gone."""

    @property
    def filled(self) -> float:
        """The share of slots."""
        return self.rollouts / self.slots if self.slots else 0.0


@dataclass(slots=True)
class ReplicaScaling:
    """Decides for one run, from one look to the next.

    >>> scaling = ReplicaScaling(ReplicaSettings(min=1, max=8, grow_after_s=2, shrink_after_s=3))
    >>> [scaling.change(at_s, Load(rollouts=32, slots=32, serving=4)) for at_s in (0, 1, 2, 3)]
    [0, 0, 2, 0]
    >>> [scaling.change(at_s, Load(rollouts=20, slots=48, serving=6)) for at_s in (10, 11, 12, 13)]
    [0, 0, 0, -1]
    """

    settings: ReplicaSettings
    _seen: deque[tuple[float, Load]] = field(default_factory=deque)
    """When, and what."""
    _since_s: float = 0.0
    """When slots became what they are, with nobody on the way, or something was decided."""
    _no_room_until_s: float = 0.0

    def no_room(self, now_s: float) -> None:
        """The cluster had no machine for the last one."""
        self._no_room_until_s = now_s + ASK_AGAIN_S

    def change(self, now_s: float, load: Load) -> int:
        """How many more there are to be, or fewer where negative."""
        if not load.serving:  # where no slots are, none are idle: while the first one loads its model, say
            self._seen.clear()
            return 0
        if not self._seen or load.on_the_way or load.slots != self._seen[-1][1].slots:
            self._since_s = now_s
        self._seen.append((now_s, load))
        while self._seen[0][0] < now_s - max(self.settings.grow_after_s, self.settings.shrink_after_s):
            self._seen.popleft()
        change = 0 if load.on_the_way else self._wanted(now_s, load)
        if change:
            self._since_s = now_s
        return change

    def _wanted(self, now_s: float, load: Load) -> int:
        is_settled_s = now_s - self._since_s
        if is_settled_s >= self.settings.grow_after_s and now_s >= self._no_room_until_s and self._is_full(now_s):
            return max(1, load.serving // 2)
        kept = load.slots * (load.serving - 1) / load.serving
        mean = fmean(seen.rollouts for _, seen in self._seen)
        return -1 if is_settled_s >= self.settings.shrink_after_s and mean <= _WOULD_DO * kept else 0

    def _is_full(self, now_s: float) -> bool:
        """All the time of late, and mostly before: a trainer that is slow lets many start at once, and then none."""
        late = [seen.filled for at_s, seen in self._seen if at_s >= now_s - self.settings.grow_after_s]
        return fmean(late) >= _FULL and fmean(seen.filled for _, seen in self._seen) >= _WOULD_DO
