"""Which of several environments the next task comes from, so that the mix of what is trained follows the weights.

An environment's credit is what it had trained, and what its tasks in flight are expected to bring:

    credit = trained + in flight x expected        expected: the share of its newest tasks that were trained

The environment with the lowest credit over weight is drawn next. So one that is slow is not drawn again for what is in
flight, and one whose tasks fail or are filtered is drawn more often.

Over-sampling of untrainable environments is bounded: an environment is never drawn more than `MAX_TASKS_PER_TRAINED`
times as often as its weight says, and one that trains fewer tasks is charged as if it trained one in so many. While the
last `UNTRAINABLE_AFTER` tasks of one were all untrainable, each is charged in full, as if trained: it gets its weight's
share of the tasks handed out and no more, until one is trained.

The credits compare histories under one set of weights. A resume with others levels them, so that draws follow the new
weights from there on and nothing is made up for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

MAX_TASKS_PER_TRAINED = 8
"""Factor over its weight by which an environment is drawn at most."""
UNTRAINABLE_AFTER = 32
"""Tasks in a row of which none was trained."""
_WINDOW = 32
"""Newest tasks that the expected share is averaged over, exponentially."""
_RECOVERED = 0.5
"""Expected share from which an environment that was untrainable has recovered: a task here and there is no news."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentFigures:
    """Figures of one environment of the mix. Counts are tasks."""

    trained: int
    trained_share: float
    """Of all tasks trained since the run began; its weight's share while there is none."""
    in_flight: int
    """Handed out, and neither trained nor otherwise ended."""
    expected: float
    """Share of its newest tasks that were trained on."""
    untrainable_tasks: int
    """Tasks charged in full although not trained, since the run began."""


class EnvironmentState(msgspec.Struct):
    """One environment's history, as a checkpoint keeps it: without what is in flight, which starts over."""

    credit: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    trained: Count = 0
    ended: Count = 0
    expected: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    untrainable_streak: Count = msgspec.field(default=0, name="in_vain")
    """Tasks in a row of which none was trained."""
    untrainable_tasks: Count = msgspec.field(default=0, name="barren_tasks")
    rewards: tuple[float, float] | None = None
    """The lowest and the highest of its scored groups; None while none of them could be trained on."""

    @property
    def is_untrainable(self) -> bool:
        """Whether its tasks are charged in full, as none was trained for long."""
        return self.untrainable_streak >= UNTRAINABLE_AFTER

    @property
    def credit_in_flight(self) -> float:
        """Credit of one task in flight."""
        return 1.0 if self.is_untrainable else max(self.expected, 1 / MAX_TASKS_PER_TRAINED)

    def end(self, *, trained: bool) -> None:
        """One of its tasks was trained, or will never be."""
        self.ended += 1
        self.expected += (trained - self.expected) / min(self.ended + 1, _WINDOW)
        if trained:
            self.trained, self.untrainable_streak, self.credit = self.trained + 1, 0, self.credit + 1.0
            return
        self.untrainable_streak += 1
        if self.is_untrainable:
            self.untrainable_tasks, self.credit = self.untrainable_tasks + 1, self.credit + 1.0
        elif self.expected < 1 / MAX_TASKS_PER_TRAINED:
            self.credit += 1 / MAX_TASKS_PER_TRAINED


class MixState(msgspec.Struct):
    """What a checkpoint keeps."""

    environments: dict[str, EnvironmentState]
    newest: str = ""
    """The environment drawn last."""
    in_a_row: Count = 0
    """Draws of it since another one was drawn."""
    shares: dict[str, float] = {}
    """What the weights come to, that the credits were earned under; none where an older version wrote it."""


class EnvironmentMix:
    """Draws environments by trained share. Plain values in and out; every call is O(environments).

    >>> mix = EnvironmentMix({"hard": 1.0, "easy": 1.0})
    >>> for number in range(600):
    ...     name = mix.draw(("hard", "easy"))
    ...     mix.hand_out(name)
    ...     mix.end(name, trained=name == "easy" or number % 3 == 0)
    >>> round(mix.figures["hard"].trained_share, 1)
    0.5
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}
        self._most_in_a_row = {name: _most_in_a_row(share) for name, share in self._shares.items()}
        self._state = MixState({name: EnvironmentState() for name in weights}, shares=self._shares)
        self._in_flight = dict.fromkeys(weights, 0)
        self._reported: set[str] = set()
        """Environments that were untrainable, as people were told, and have not recovered since."""

    def draw(self, names: Collection[str]) -> str:
        """The environment that lags its weight most; of equal ones the first."""
        state = self._state
        if len(names) > 1 and state.newest and state.in_a_row >= self._most_in_a_row[state.newest]:
            names = [name for name in names if name != state.newest]
        name = min(names, key=self._progress)
        state.newest, state.in_a_row = name, state.in_a_row + 1 if name == state.newest else 1
        return name

    def hand_out(self, name: str) -> None:
        """A task of this environment is in flight."""
        self._in_flight[name] += 1

    def end(self, name: str, *, trained: bool) -> None:
        """A task in flight was put into a batch, or never will be."""
        self._in_flight[name] -= 1
        state = self._state.environments[name]
        state.end(trained=trained)
        self._tell(name, state)

    def scored(self, name: str, rewards: Sequence[float], *, trainable: bool) -> None:
        """The rewards of a group of this environment, and whether the group can be trained on."""
        state = self._state.environments[name]
        if state.rewards is not None or trainable:
            known = [*rewards, *(state.rewards or ())]
            state.rewards = min(known), max(known)

    def reward_range(self, name: str) -> tuple[float, float] | None:
        """The lowest and the highest reward of this environment; None while none of its tasks was trained."""
        state = self._state.environments[name]
        return state.rewards if state.trained else None

    def state(self) -> MixState:
        """What a checkpoint keeps; it changes with the mix, so encode it before the next call."""
        return self._state

    def restore(self, state: MixState) -> None:
        """Go on from there, with nothing in flight, and with level credits where the weights were others."""
        known = {name: state.environments.get(name, EnvironmentState()) for name in self._shares}
        self._state = MixState(known, shares=self._shares)
        if state.newest in self._shares:
            self._state.newest, self._state.in_a_row = state.newest, state.in_a_row
        self._in_flight = dict.fromkeys(self._shares, 0)
        self._reported = {name for name, one in self._state.environments.items() if one.is_untrainable}
        if state.shares and not _are_same(state.shares, self._shares):
            self._level()

    @property
    def figures(self) -> dict[str, EnvironmentFigures]:
        """Of every environment, by name."""
        states = self._state.environments
        trained = sum(state.trained for state in states.values())
        return {
            name: EnvironmentFigures(
                trained=state.trained,
                trained_share=state.trained / trained if trained else self._shares[name],
                in_flight=self._in_flight[name],
                expected=state.expected,
                untrainable_tasks=state.untrainable_tasks,
            )
            for name, state in states.items()
        }

    def _level(self) -> None:
        """Give each environment its share of all credit, as if the weights had been these from the beginning."""
        states = self._state.environments
        total = sum(state.credit for state in states.values())
        for name, share in self._shares.items():
            states[name].credit = share * total
        _logger.info(
            "the environments' weights are not those of before: tasks are drawn by the new ones from here on (%s), and "
            "nothing is made up for what was trained under the others",
            ", ".join(f"{name} {share:.1%}" for name, share in self._shares.items()),
        )

    def _tell(self, name: str, state: EnvironmentState) -> None:
        """Log that an environment has become untrainable, and that it has recovered, each once."""
        if state.is_untrainable and name not in self._reported:
            self._reported.add(name)
            _logger.warning(
                "nothing of the last %d tasks of environment %r could be trained on: it gets no more than its weight's "
                "share of the tasks handed out, until something can",
                *(UNTRAINABLE_AFTER, name),
            )
        elif name in self._reported and state.expected >= _RECOVERED:
            self._reported.remove(name)
            _logger.info("most tasks of environment %r can be trained on again", name)

    def _progress(self, name: str) -> float:
        state = self._state.environments[name]
        return (state.credit + self._in_flight[name] * state.credit_in_flight) / self._shares[name]


def _are_same(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether they are equal shares of the same environments, rounding aside: it depends on their order."""
    return before.keys() == now.keys() and all(math.isclose(before[name], share) for name, share in now.items())


def _most_in_a_row(share: float) -> int:
    """Draws in a row after which another environment is drawn, for a weight of this share."""
    return math.ceil(MAX_TASKS_PER_TRAINED * share / (1.0 - share)) if share < 1.0 else 1
