"""How old tokens may be when they are trained on, and what `on_stale` does about older ones. Pure.

A group's floor is the oldest version that a generator served when the group started: none of its tokens is older. So a
group of floor f fits a batch for a trainer of version v whole while `v - f <= max_staleness`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from tailrace.batching import STALE
from tailrace.scheduling.settings import OnStale, SchedulingSettings

RESTARTED = "restarted"

GroupT = TypeVar("GroupT")


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a running group is stopped, and whether its task is started again."""

    reason: str
    restarts_task: bool


class StalePolicy:
    """`on_stale = mask`: stale tokens stay as context and carry no loss. No group is stopped, and no batch waits."""

    drops_rollouts: ClassVar[bool] = False
    """Whether a finished rollout with a stale token is left out; otherwise only those tokens are masked."""
    stops_groups: ClassVar[bool] = False
    """Whether `stale_action` ever stops a group."""

    def __init__(self, settings: SchedulingSettings, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._settings = settings

    def oldest_allowed(self, trainer_version: int) -> int:
        """Tokens of this version and newer may bear loss in a batch for a trainer of at most `trainer_version`."""
        return trainer_version - self.max_staleness

    def stale_action(self, restarts: int) -> Stop | None:
        """Action for a running group past the bound, whose task was restarted so often; None: continue."""
        return None

    def restarts_finished(self, restarts: int) -> bool:
        """Whether a finished group with a stale token is started again instead of trained on."""
        return False

    def holds_batch(self, oldest_floor: int | None, trainer_version: int) -> bool:
        """Whether a full batch waits, as its step would push the oldest running group past the bound."""
        return False

    def trainable_capacity(self, age: int) -> int | None:
        """Started rollouts that may be in no batch while tokens sampled now are `age` versions old; None: any."""
        return None


class WaitPolicy(StalePolicy):
    """A batch whose step would make a running group too old is held until that group ends: nothing is masked."""

    @override
    def holds_batch(self, oldest_floor: int | None, trainer_version: int) -> bool:
        # the next batch is for a trainer one version further
        return oldest_floor is not None and oldest_floor < self.oldest_allowed(trainer_version + 1)

    @override
    def trainable_capacity(self, age: int) -> int | None:
        return (self.max_staleness + 1 - age) * self._settings.batch_size


class RestartPolicy(StalePolicy):
    """A group past the bound is started again, running or finished; once that was done `max_restarts` times, masked."""

    stops_groups = True

    @override
    def stale_action(self, restarts: int) -> Stop | None:
        # as soon as it is known, since what the group would still sample is thrown away as well
        return Stop(RESTARTED, restarts_task=True) if self.restarts_finished(restarts) else None

    @override
    def restarts_finished(self, restarts: int) -> bool:
        return restarts < self._settings.max_restarts


class DropPolicy(StalePolicy):
    """A running group past the bound is stopped, and a finished rollout with a stale token is left out."""

    drops_rollouts = stops_groups = True

    @override
    def stale_action(self, restarts: int) -> Stop | None:
        return Stop(STALE, restarts_task=False)


_POLICIES: dict[OnStale, type[StalePolicy]] = {
    "mask": StalePolicy,
    "wait": WaitPolicy,
    "restart": RestartPolicy,
    "drop": DropPolicy,
}


def stale_policy(settings: SchedulingSettings, max_staleness: int) -> StalePolicy:
    """The policy of `on_stale`.

    >>> policy = stale_policy(SchedulingSettings(on_stale="wait"), max_staleness=4)
    >>> policy.holds_batch(3, trainer_version=6), policy.holds_batch(3, trainer_version=7)
    (False, True)
    """
    return _POLICIES[settings.on_stale](settings, max_staleness)


class Floors(Generic[GroupT]):
    """The groups that run, by floor. There are as many floors as versions in use: a handful.

    >>> floors = Floors[str]()
    >>> floors.add("a", 3); floors.add("b", 4)
    >>> floors.oldest, list(floors.below(4))
    (3, ['a'])
    """

    def __init__(self) -> None:
        self._groups: defaultdict[int, dict[GroupT, None]] = defaultdict(dict)

    def add(self, group: GroupT, floor: int) -> None:
        """A group starts."""
        self._groups[floor][group] = None

    def remove(self, group: GroupT, floor: int) -> None:
        """A group has ended."""
        del self._groups[floor][group]
        if not self._groups[floor]:
            del self._groups[floor]

    @property
    def oldest(self) -> int | None:
        """The lowest floor; None while nothing runs."""
        return min(self._groups, default=None)

    def below(self, version: int) -> Iterator[GroupT]:
        """Groups whose floor is below `version`, oldest first."""
        for floor in sorted(floor for floor in self._groups if floor < version):
            yield from list(self._groups[floor])
