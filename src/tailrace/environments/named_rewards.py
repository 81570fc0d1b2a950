"""Rewards as weighted sums of named functions in TRL's form: `def reward(prompts, completions, **columns)`.

    def right(prompts, completions, answer, **columns) -> list[float | None]:
        return [float(a in completion[-1]["content"]) for completion, a in zip(completions, answer)]

A prompt is what came before the policy's first reply (an assistant's messages in a row's `prompt` are of it), a
completion everything from there on, both as messages; every column of the tasks' rows is a list, and so are
`completion_ids`, the tokens of each completion. A reply's content is all that was sampled, its reasoning included;
only that of a turn with tools, or by tokens, is split into content, `reasoning_content` and `tool_calls`.
`trainer_state` has a `global_step` and `max_steps`. A function may be async. `None` means that it does not apply to
that completion: it then adds nothing to the sum, and is not among the components.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import msgspec
import numpy as np

from tailrace.environments.results import AgentResult, finite_number
from tailrace.errors import InvalidReward
from tailrace.records import Json, Message, Task

RewardsFunction: TypeAlias = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""TRL's reward function: lists in, one number or None per completion out."""

_NOT_COLUMNS = ("prompt", "completion", "completion_ids", "prompts", "completions", "trainer_state")
"""Columns that TRL does not pass on either, and the names of the other arguments."""


class TrainerState(msgspec.Struct, frozen=True):
    """Where training is, by the names that TRL's functions know."""

    global_step: int = 0
    """Steps whose weights sampled the newest token that is scored; 0 before the first."""
    max_steps: int = 0
    """0 where training has no last step."""


class ScoredRollout(msgspec.Struct, frozen=True):
    """What named functions see of one rollout."""

    messages: list[Message]
    num_prompt_messages: int
    """So many of them came before the policy's first reply."""
    completion_ids: bytes = b""
    """The completion's tokens from the first sampled one on, int32: those of tools and users between turns included."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """One function of a weighted sum."""

    function: RewardsFunction
    weight: float = 1.0
    together: bool = False
    """Called once with all rollouts of a group, when the last one ended; otherwise with each when that one ended."""

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that every row must have: parameters without a default, but for those that are no columns."""
        return _required_columns(self.function)

    def call(
        self,
        tasks: Sequence[Task],
        rollouts: Sequence[ScoredRollout],
        state: TrainerState,
        environments: Sequence[object] = (),
    ) -> object:
        """What the function returns for these rollouts: hand it to `checked_values`, awaited where it is awaitable.

        `environments` are theirs, where the function is called beside them.
        """
        columns: dict[str, list[Json]] = {
            name: [task.row.get(name) for task in tasks]
            for name in dict.fromkeys(name for task in tasks for name in task.row)
            if name not in _NOT_COLUMNS
        }
        given: dict[str, object] = {
            "prompts": [one.messages[: one.num_prompt_messages] for one in rollouts],
            "completions": [one.messages[one.num_prompt_messages :] for one in rollouts],
            **columns,
            "trainer_state": state,
        }
        if environments:
            given["environments"] = list(environments)
        accepted = _accepted(self.function)
        if accepted is None or "completion_ids" in accepted:
            given["completion_ids"] = [np.frombuffer(one.completion_ids, np.int32).tolist() for one in rollouts]
        if accepted is not None:
            given = {name: value for name, value in given.items() if name in accepted}
        return self.function(**given)


def needs_environments(function: RewardsFunction) -> bool:
    """Whether it looks at the environments of the completions, by TRL's name for that argument."""
    return "environments" in inspect.signature(function).parameters


def checked_values(returned: object, count: int, name: str) -> list[float | None]:
    """What a function returned, as one finite number or None per completion. Raises `InvalidReward` otherwise.

    >>> checked_values([True, None], 2, "right")
    [1.0, None]
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != count:
        what = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(returned).__name__}"
        raise InvalidReward(
            f"reward function {name!r} returned {what} for {count} completions; it returns a list"
        ).as_mistake()
    what = f"a value of reward function {name!r}"
    return [None if value is None else finite_number(value, what) for value in values]


def weighted_sum(values: Mapping[str, float | None], rewards: Mapping[str, NamedReward]) -> AgentResult:
    """The reward that the named values add up to, with each as a metric; None where no function applies.

    >>> weighted_sum({"right": 1.0, "brief": 0.5, "tool": None}, {
    ...     "right": NamedReward(print), "brief": NamedReward(print, 0.2), "tool": NamedReward(print)})
    AgentResult(reward=1.1, metrics={'right': 1.0, 'brief': 0.5}, info={})
    """
    metrics = {name: value for name, value in values.items() if value is not None}
    if not metrics:
        return AgentResult()
    return AgentResult(math.fsum(rewards[name].weight * value for name, value in metrics.items()), metrics)


@cache
def _accepted(function: RewardsFunction) -> frozenset[str] | None:
    """Names that it takes as keywords; None: any."""
    parameters: Iterable[inspect.Parameter] = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


@cache
def _required_columns(function: RewardsFunction) -> tuple[str, ...]:
    return tuple(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and parameter.name not in (*_NOT_COLUMNS, "environments")
    )
