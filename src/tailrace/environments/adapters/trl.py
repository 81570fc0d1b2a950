"""TRL's environment classes and reward functions, as they are.

    class IncrementEnv:                                      no argument to make one
        def reset(self, **row) -> str | None: ...            what it returns is appended to the last user message
        def get_reward(self) -> float: ...                   optional: scores the finished rollout
        def increment(self, step: int) -> int: ...           every other public method is a tool

    --environment.name my_module:IncrementEnv

A rollout ends with a reply that calls no tool, or where its turns or tokens run out. `get_reward` and reward functions
add up. What tools raise is told to the policy, as TRL does. Nothing of TRL is imported.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from tailrace.environments.callables import is_async, settled
from tailrace.environments.named_rewards import (
    NamedReward,
    RewardsFunction,
    ScoredRollout,
    TrainerState,
    checked_values,
    needs_environments,
    weighted_sum,
)
from tailrace.environments.protocol import EnvironmentSpec, Observation, TaskRows
from tailrace.environments.results import AgentResult, finite_number
from tailrace.environments.rows import EmptyRows
from tailrace.environments.single_turn import asked_in
from tailrace.environments.tool_schemas import tool_spec
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.records import Json, Message, Task, ToolCall, ToolSpec

_NOT_TOOLS = ("reset", "get_reward")
_DRAWN_TASKS, _DRAWN_EVAL_TASKS = 100_000, 200
"""Of a class that draws its own tasks."""


def is_trl_class(target: object) -> bool:
    """Whether this is an environment class in TRL's form: with `reset`, and with `get_reward` or without `step`."""
    if not inspect.isclass(target) or not hasattr(target, "reset"):
        return False
    return hasattr(target, "get_reward") or not hasattr(target, "step")


def trl_environment(
    environment: Callable[[], object],
    *,
    name: str | None = None,
    train_tasks: TaskRows | None = None,
    eval_tasks: TaskRows = (),
    held_out: int = 0,
    rewards: Sequence[RewardsFunction] | Mapping[str, RewardsFunction | NamedReward] = (),
    scored_elsewhere: bool = False,
) -> EnvironmentSpec:
    """What TRL calls an `environment_factory`, with its reward functions and data set.

    Rows are passed to `reset`; a `prompt` column (text, or messages) opens the conversation. Without `train_tasks` the
    class draws its own tasks: `random` and NumPy's global generator are seeded by the task for the time of `reset`
    (not where it is async), so that the rollouts of a group are about the same one. `rewards` are functions, weight 1
    each, or by name with `NamedReward(function, weight)`; one that takes `environments` is called where the environment
    lives. `scored_elsewhere`: the settings name what scores it, functions or a judge.

    Raises `SettingsError` for what is no such class, a tool that cannot be described to the policy, a class and
    functions that score nothing, and what needs images.
    """
    form = _Form.of(environment)
    named = _named(rewards)
    beside = {key: reward for key, reward in named.items() if needs_environments(reward.function)}
    for key, reward in beside.items():
        if away := {"completion_ids", "trainer_state"} & inspect.signature(reward.function).parameters.keys():
            raise SettingsError(
                f"reward function {key!r} looks at `environments` and at `{min(away)}`, which are not in one process"
            )
        if reward.together:
            raise SettingsError(
                f"reward function {key!r} looks at `environments`, and is called beside each of them when its rollout "
                "ends: leave `together` out"
            )
    if not (form.has_reward or named or scored_elsewhere):
        raise SettingsError(
            f"{form.name} has `reset` and no `step`, as TRL's environments do, and nothing scores it: give it "
            "`get_reward`, name a function under environment.rewards.NAME.function, or give it an environment.judge"
        )
    if train_tasks is None and not form.required_columns:
        train_tasks = EmptyRows(_DRAWN_TASKS)
        eval_tasks = eval_tasks or (() if held_out else EmptyRows(_DRAWN_EVAL_TASKS))
    for rows in (train_tasks or (), eval_tasks):
        if len(rows):
            _refuse_images(rows[0], form.name)
    of_beside = (column for reward in beside.values() for column in reward.required_columns)
    session = AsyncTrlSession if form.is_async else TrlSession
    return EnvironmentSpec(
        name=name or form.name,
        environment=partial(session, replace(form, rewards=beside)),
        train_tasks=train_tasks or (),
        eval_tasks=eval_tasks,
        held_out=held_out,
        tools=form.tools,
        rewards={key: reward for key, reward in named.items() if key not in beside},
        adds_rewards=True,
        required_columns=(*form.required_columns, *of_beside),
        description=(inspect.getdoc(form.kind) or "").partition("\n")[0],
    )


@dataclass(frozen=True)
class _Form:
    """What a factory makes, read from its class."""

    factory: Callable[[], Any]
    kind: type
    tools: tuple[ToolSpec, ...]
    required_columns: tuple[str, ...]
    takes_columns: frozenset[str] | None
    """Names that `reset` takes; None: any."""
    has_reward: bool
    is_async: bool
    """All of its methods are coroutine functions."""
    rewards: Mapping[str, NamedReward] = field(default_factory=dict)
    """Functions that are shown the environment itself."""

    @property
    def name(self) -> str:
        return self.kind.__name__

    @classmethod
    def of(cls, factory: Callable[[], Any]) -> _Form:
        """Raises `SettingsError` where it makes no environment in TRL's form."""
        if isinstance(factory, Mapping):
            raise SettingsError(
                "trl_environment takes one class: several are several [[environments]] of the run, with a weight each"
            )
        if not callable(factory):
            raise SettingsError(f"trl_environment takes an environment class; this is a {type(factory).__name__}")
        made = getattr(factory, "func", factory)  # of a functools.partial
        kind: type = made if inspect.isclass(made) else type(factory())
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        if "reset" not in methods:
            raise SettingsError(f"{kind.__name__} has no method `reset`, which every TRL environment has")
        tools = [method for name, method in methods.items() if name not in _NOT_TOOLS and not name.startswith("_")]
        reset = [*inspect.signature(methods["reset"]).parameters.values()][1:]
        by_name = [one for one in reset if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in reset)
        has_reward = "get_reward" in methods
        played = [methods["reset"], *tools, *([methods["get_reward"]] if has_reward else [])]
        return cls(
            factory,
            kind,
            tools=tuple(tool_spec(method) for method in tools),
            required_columns=tuple(one.name for one in by_name if one.default is one.empty),
            takes_columns=None if takes_any else frozenset(one.name for one in by_name),
            has_reward=has_reward,
            is_async=all(map(is_async, played)),
        )


class TrlSession:
    """One rollout with one environment: reset/step, in a process that can be killed unless it is trusted."""

    def __init__(self, form: _Form) -> None:
        self._form = form
        self._environment = form.factory()
        self._tools = {tool["name"]: getattr(self._environment, tool["name"]) for tool in form.tools}
        self._messages: list[Message] = []
        self._num_prompt_messages = 0
        self._tool_errors = 0

    def reset(self, task: Task) -> Awaitable[Observation]:
        """Open the conversation: the row's `prompt`, with what the environment's own `reset` returns."""
        return self._reset(task)

    def step(self, reply: Message) -> Awaitable[Observation]:
        """Run the reply's tools; one that calls none is the last."""
        return self._step(reply)

    def end_early(self) -> Awaitable[Observation]:
        """Score what there is: no turn or token is left."""
        return self._end()

    def __getattr__(self, name: str) -> object:
        """An attribute of the environment, as `columns` of the settings may name it."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._environment, name)

    async def _reset(self, task: Task) -> Observation:
        _refuse_images(task.row, self._form.name)
        self._task = task
        takes = self._form.takes_columns
        row = {name: value for name, value in task.row.items() if takes is None or name in takes}
        with nullcontext() if is_async(self._environment.reset) else _drawing_alike(task):
            returned = await settled(self._environment.reset(**row))
        self._messages = _opening(task, returned, self._form.name)
        self._num_prompt_messages = len(self._messages)
        return Observation(self._messages.copy())

    async def _step(self, reply: Message) -> Observation:
        self._messages.append(reply)
        if not (calls := reply.get("tool_calls")):
            return await self._end()
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._answer(call)) for call in calls]
        answers = [task.result() for task in tasks]
        self._messages += answers
        return Observation(answers)

    async def _answer(self, call: ToolCall) -> Message:
        """What a tool returned or raised, in the words that TRL passes on."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            keywords = json.loads(arguments) if isinstance(arguments, str) else deepcopy(arguments)
            content = _as_text(await settled(self._tools[name](**keywords)), name)
        except EnvironmentFailed:
            raise
        except Exception as error:  # noqa: BLE001  tools may raise anything; the policy reads it
            self._tool_errors += 1
            content = str({"error": str(error)})
        message = Message(role="tool", name=name, content=content)
        return {**message, "tool_call_id": call["id"]} if "id" in call else message

    async def _end(self) -> Observation:
        """The rollout's reward: the environment's own and that of functions which look at it."""
        sources: list[AgentResult] = []
        if self._form.has_reward:
            own = await settled(self._environment.get_reward())
            value = finite_number(own, f"what get_reward of {self._form.name} returned")
            sources.append(AgentResult(value, {self._form.name: value}))
        if self._form.rewards:
            sources.append(await self._beside())
        values = [one.reward for one in sources if one.reward is not None]
        metrics = {name: value for one in sources for name, value in one.metrics.items()}
        return Observation.end(
            sum(values) if values else None, metrics={**metrics, "tool_errors": float(self._tool_errors)}
        )

    async def _beside(self) -> AgentResult:
        rollout, values = ScoredRollout(self._messages, self._num_prompt_messages), {}
        for name, reward in self._form.rewards.items():
            returned = await settled(reward.call([self._task], [rollout], TrainerState(), [self._environment]))
            (values[name],) = checked_values(returned, 1, name)
        return weighted_sum(values, self._form.rewards)


class AsyncTrlSession(TrlSession):
    """One whose methods are all coroutines: it runs on the event loop."""

    @override
    async def reset(self, task: Task) -> Observation:
        return await self._reset(task)

    @override
    async def step(self, reply: Message) -> Observation:
        return await self._step(reply)

    @override
    async def end_early(self) -> Observation:
        return await self._end()


def _named(
    rewards: Sequence[RewardsFunction] | Mapping[str, RewardsFunction | NamedReward],
) -> dict[str, NamedReward]:
    if not isinstance(rewards, Mapping):
        names = [getattr(function, "__name__", f"reward_{number}") for number, function in enumerate(rewards)]
        if len(set(names)) < len(names):
            raise SettingsError(f"two reward functions have the same name among {', '.join(names)}: give a mapping")
        rewards = dict(zip(names, rewards, strict=True))
    return {name: one if isinstance(one, NamedReward) else NamedReward(one) for name, one in rewards.items()}


def _refuse_images(row: Mapping[str, Json], name: str) -> None:
    if columns := [column for column in ("image", "images") if column in row]:
        raise SettingsError(f"{name}: its tasks have a column {columns[0]!r}; Tailrace trains on text alone")


def _opening(task: Task, returned: object, name: str) -> list[Message]:
    """The conversation before the first reply. Raises `DataError` for a `prompt` that is no text and no messages."""
    if returned is not None and not isinstance(returned, str | list):
        raise EnvironmentFailed(f"reset of {name} returned a {type(returned).__name__}; it returns text or None")
    added = "" if returned is None else _as_text(returned, "reset")
    messages = [] if task.row.get("prompt") is None else asked_in(task, "prompt")
    last = messages.pop() if messages else Message(role="user", content="")
    messages.append({**last, "content": _as_text(last["content"], "prompt") + added})
    if not any(message["content"] for message in messages):
        raise EnvironmentFailed(f"there is nothing to ask: the row has no `prompt`, and reset of {name} returned none")
    return messages


def _as_text(value: object, name: str) -> str:
    """What a tool returned; of blocks of content their text. Raises `EnvironmentFailed` for an image."""
    if not (isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value)):
        return str(value)
    for part in value:
        if part["type"] != "text":
            raise EnvironmentFailed(f"{name} returned content of type {part['type']!r}; the policy reads text alone")
    return "".join(part["text"] for part in value)


@contextmanager
def _drawing_alike(task: Task) -> Iterator[None]:
    """The global generators, seeded by the task, and afterwards as they were."""
    key = f"{task.task_id}/{task.seed}"
    own, arrays = random.getstate(), np.random.get_state()
    random.seed(key)
    np.random.seed(zlib.crc32(key.encode()))
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)
