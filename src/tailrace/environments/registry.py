"""From a name to an environment.

"reverse-text"          a built-in one, or one that an installed package offers as an entry point
"my_module:attribute"   your own: an `EnvironmentSpec`, a factory of one, an agent coroutine, an Environment class, or
                        an environment class in TRL's form
"<program>:name"        an object of the Python program that trains, which no other process can import
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from tailrace.environments.adapters.trl import is_trl_class, trl_environment
from tailrace.environments.arguments import check_arguments
from tailrace.environments.datasets import first_rows, hold_out, load_rows
from tailrace.environments.files import ArrowRows, JsonlRows
from tailrace.environments.judge import JudgeSettings
from tailrace.environments.named_rewards import NamedReward, needs_environments
from tailrace.environments.programs import CommandAgent
from tailrace.environments.protocol import EnvironmentSpec
from tailrace.environments.rows import Row, SplitRows
from tailrace.environments.settings import EnvironmentSettings
from tailrace.errors import DataError, SettingsError, TailraceError
from tailrace.near_names import did_you_mean
from tailrace.user_code import describe_failure, import_attribute

ENTRY_POINT_GROUP = "tailrace.environments"
BUILT_IN = {
    "alphabet-sort": "tailrace.environments.alphabet_sort:alphabet_sort",
    "arithmetic": "tailrace.environments.arithmetic:arithmetic",
    "calculator": "tailrace.environments.calculator:calculator",
    "mcp": "tailrace.environments.adapters.mcp:mcp",
    "openenv": "tailrace.environments.adapters.openenv:openenv",
    "reasoning-gym": "tailrace.environments.adapters.reasoning_gym:reasoning_gym",
    "reverse-text": "tailrace.environments.reverse_text:reverse_text",
    "verifiers": "tailrace.environments.adapters.verifiers:verifiers",
    "verifiers-v1": "tailrace.environments.adapters.verifiers_v1.environment:verifiers_v1",
}
"""Imported when first used."""
OF_THE_PROGRAM = "<program>:"
"""No module is called that, so a run that goes on without the object cannot take another environment of its name."""
_NO_FACTORY = (
    "; it is called for an EnvironmentSpec. An agent is an `async def agent(task, policy)`, and a reward function is "
    "named under environment.rewards.NAME.function"
)
"""What a function may be whose arguments are missing."""
_PLAYED_BY_OTHERS = ("verifiers",)
"""Built-in names of environments whose code is not Tailrace's."""

_ROWS_CHECKED = 10_000
"""Of rows in files and lists; of generated ones only the first, of each kind that takes turns. Later rows are checked
when they are drawn."""


def environment_names() -> list[str]:
    """Names that `environment.name` may be, built-in and installed, besides `module:attribute`."""
    return sorted({*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})


def is_built_in(name: str) -> bool:
    """Whether `environment.name` means code of Tailrace's own.

    >>> is_built_in("arithmetic"), is_built_in("tailrace.environments.arithmetic:arithmetic"), is_built_in("own:spec")
    (True, True, False)
    """
    return (name in BUILT_IN and name not in _PLAYED_BY_OTHERS) or name in BUILT_IN.values()


def load_environment(
    settings: EnvironmentSettings, *, with_tasks: bool = True, given: object | None = None
) -> EnvironmentSpec:
    """The environment that the settings describe, its held-out tasks split off.

    Cheap, and depends on the settings and the files and modules they name alone, so that any process can re-create the
    environment. A worker process, whose tasks are sent to it, passes `with_tasks=False` and gets a spec without rows.
    `given` is what the settings name, where that is an object of this process that no other one can import.

    Raises `SettingsError` for an unknown environment, a wrong argument or a missing extra, `DataError` for a data set
    that is missing, empty or malformed, or lacks a required column.
    """
    target = _find(settings.name) if given is None else given
    spec = _to_spec(target, settings)
    if isinstance(spec.agent, CommandAgent):
        spec.agent.require_command()
    spec = replace(
        spec,
        name=settings.id or spec.name,
        trusted=spec.trusted if settings.trusted is None else settings.trusted,
        info_keys=spec.info_keys if settings.columns is None else settings.columns,
        judge=_judge(spec, settings),
        rewards={**spec.rewards, **_rewards(spec, settings)},
    )
    if not with_tasks:
        return replace(spec, train_tasks=(), eval_tasks=(), held_out=0)
    return _with_tasks(spec, settings)


def _judge(spec: EnvironmentSpec, settings: EnvironmentSettings) -> JudgeSettings | None:
    """The environment's own judge, with what the settings set in its place."""
    changes = settings.judge
    if changes is None or spec.judge is None:
        return changes or spec.judge
    return spec.judge.model_copy(update=changes.model_dump())


def _rewards(spec: EnvironmentSpec, settings: EnvironmentSettings) -> dict[str, NamedReward]:
    """The reward functions that the settings name or weigh anew."""
    chosen: dict[str, NamedReward] = {}
    for name, changes in settings.rewards.items():
        own = spec.rewards.get(name)
        key = ("rewards", name, "function")
        if changes.function is not None:
            setting = f"environment.rewards.{name}.function"
            function = import_attribute(changes.function, setting=setting)
            if not callable(function):
                raise SettingsError(f"environment.rewards.{name}: {changes.function} is not a function", key=key)
            if needs_environments(function):
                raise SettingsError(
                    f"environment.rewards.{name}: {changes.function} looks at `environments`, beside which it has to "
                    "run: name it in the code, trl_environment(..., rewards=[...])",
                    key=key,
                )
        elif own is not None:
            function = own.function
        else:
            have = ", ".join(spec.rewards) or "none"
            raise SettingsError(
                f"environment.rewards.{name} names no function, and environment {spec.name!r} has no reward of that "
                f"name; its own are: {have}",
                key=key,
            )
        given = changes.model_dump(include={"weight", "together"}, exclude_none=True)
        chosen[name] = replace(own or NamedReward(function), function=function, **given)
    return chosen


def _with_tasks(spec: EnvironmentSpec, settings: EnvironmentSettings) -> EnvironmentSpec:
    if settings.data is not None:
        spec = replace(spec, train_tasks=load_rows(settings.data), eval_tasks=(), held_out=0)
    if settings.eval_data is not None:
        spec = replace(spec, eval_tasks=load_rows(settings.eval_data), held_out=0)
    if len(spec.train_tasks) == 0:
        raise DataError(f"environment {spec.name!r} has no task to train on; give environment.data or `train_tasks`")
    _require_columns(spec)
    if len(spec.eval_tasks):
        limit = len(spec.eval_tasks) if settings.eval_tasks is None else settings.eval_tasks
        return replace(spec, eval_tasks=first_rows(spec.eval_tasks, limit))
    count = spec.held_out if settings.eval_tasks is None else settings.eval_tasks
    if count == 0:
        return replace(spec, held_out=0)
    train_tasks, eval_tasks = hold_out(spec.train_tasks, count, name=spec.name)
    return replace(spec, train_tasks=train_tasks, eval_tasks=eval_tasks, held_out=0)


def _require_columns(spec: EnvironmentSpec) -> None:
    """Report a missing column before the run starts, not when its row is drawn."""
    if spec.all_required_columns:
        for rows, make in ((spec.train_tasks, spec.train_task), (spec.eval_tasks, spec.eval_task)):
            for index in range(min(len(rows), _num_checked(rows))):
                make(index)


def _num_checked(rows: Sequence[Row]) -> int:
    if isinstance(rows, list | tuple | JsonlRows | ArrowRows):
        return _ROWS_CHECKED
    return rows.num_kinds if isinstance(rows, SplitRows) else 1


def _find(name: str) -> object:
    if name.startswith(OF_THE_PROGRAM):
        own = name.removeprefix(OF_THE_PROGRAM)
        raise SettingsError(
            f"environment.name is {name!r}, an object of the Python program that began the run: give that object again "
            f'where the run goes on, tailrace.train(..., {{"resume": True, "environment": {own}}})'
        )
    if name in BUILT_IN or ":" in name:
        return import_attribute(BUILT_IN.get(name, name), setting="environment.name")
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return import_attribute(entry_point.value, setting="environment.name")
    names = environment_names()
    hint = did_you_mean(name, names, cutoff=0.5) or "."
    raise SettingsError(
        f"environment.name is {name!r}, which is no environment{hint} "
        f"Known ones: {', '.join(names)}; or write your own as `module:attribute`"
    )


def _to_spec(target: object, settings: EnvironmentSettings) -> EnvironmentSpec:
    """An `EnvironmentSpec` from whatever a name may point to."""
    own_name = settings.name.rpartition(":")[2]
    if isinstance(target, EnvironmentSpec):
        if settings.args:
            raise SettingsError(
                f"environment.args: {settings.name!r} is a finished EnvironmentSpec and takes none", key=("args",)
            )
        return target
    if inspect.isclass(target) and is_trl_class(target):
        factory = _with_arguments(target, settings)
        scored_elsewhere = bool(settings.rewards) or settings.judge is not None
        return trl_environment(factory, name=own_name, scored_elsewhere=scored_elsewhere)
    if inspect.isclass(target) and hasattr(target, "reset") and hasattr(target, "step"):
        return EnvironmentSpec(name=own_name, environment=_with_arguments(target, settings))
    if inspect.iscoroutinefunction(target):
        if not _takes_task_and_policy(target):
            raise _is_none(settings.name, f"an async function that takes {inspect.signature(target)}")
        return EnvironmentSpec(name=own_name, agent=_with_arguments(target, settings, positional=2))
    if inspect.isfunction(target) and [*inspect.signature(target).parameters][:2] == ["task", "policy"]:
        raise _is_none(settings.name, "a function of a task and a policy that is not async")
    if callable(target) and not inspect.isclass(target):
        return _call_factory(target, settings)
    raise _is_none(settings.name, f"a class, {target.__name__}" if inspect.isclass(target) else f"{target!r:.80}")


def _takes_task_and_policy(agent: Callable[..., Any]) -> bool:
    parameters = inspect.signature(agent).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) >= 2 or any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )


def _is_none(name: str, what: str) -> SettingsError:
    return SettingsError(
        f"environment.name is {name!r}: that is {what}; expected an EnvironmentSpec, a function that returns one, an "
        "`async def agent(task, policy)` or a class with reset and step"
    )


def _call_factory(factory: Callable[..., Any], settings: EnvironmentSettings) -> EnvironmentSpec:
    try:
        inspect.signature(factory)
    except ValueError:
        raise _is_none(settings.name, f"{factory!r:.80}") from None
    try:
        spec = _with_arguments(factory, settings, what_else=_NO_FACTORY)()
    except ValidationError as error:  # a factory that checks its arguments with a pydantic model of its own
        problem = error.errors()[0]
        name = ".".join(["environment.args", *map(str, problem["loc"])])
        raise SettingsError(f"{name} of {settings.name}: {problem['msg']}", key=("args", *problem["loc"])) from error
    except TailraceError:
        raise
    except Exception as error:
        raise SettingsError(
            f"environment.name is {settings.name!r}: that function raised {describe_failure(error)}"
        ) from error
    if isinstance(spec, EnvironmentSpec):
        return spec
    raise SettingsError(
        f"environment.name is {settings.name!r}: that function returned a {type(spec).__name__}, not an EnvironmentSpec"
    )


def _with_arguments(
    target: Callable[..., Any], settings: EnvironmentSettings, *, positional: int = 0, what_else: str = ""
) -> Callable[..., Any]:
    arguments = check_arguments(target, settings.args, owner=settings.name, positional=positional, what_else=what_else)
    return partial(target, **arguments) if arguments else target
