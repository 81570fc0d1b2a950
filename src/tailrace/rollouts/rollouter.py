"""One task to one finished, scored rollout; whatever goes wrong costs that rollout and says why."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tailrace.environments import Agent, EnvironmentSettings, EnvironmentSpec
from tailrace.errors import (
    BudgetExceeded,
    EngineFailed,
    EnvironmentFailed,
    RequestRefused,
    RolloutError,
    RolloutTimeout,
    SettingsError,
    TransportError,
)
from tailrace.records import Generate, Group, GroupId, Reward, Rollout, RolloutId, SamplingParams, Task
from tailrace.rollouts.agents import environment_agent, hosted_agent
from tailrace.rollouts.attempts import Attempts
from tailrace.rollouts.policy import RolloutBudget, RolloutPolicy
from tailrace.rollouts.rendering import Renderer
from tailrace.rollouts.scoring import require_reward, score_group
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.worker_pool import WorkerEnvironment, WorkerPool


class Rollouter:
    """Runs rollouts, any number at once, on the running event loop.

    Synchronous code of environments that are not trusted runs in `workers`, which re-create an environment from its
    settings; `environments` holds those, by the environment's name. Use it as an async context manager, or `close` it.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        renderer: Renderer,
        generate: Generate,
        environments: Mapping[str, EnvironmentSettings] | None = None,
        max_model_tokens: int | None = None,
        worker_log: Path | None = None,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._generate = generate
        self._max_model_tokens = max_model_tokens
        self._attempts = Attempts()
        self._workers = WorkerPool(settings, environments or {}, log_path=worker_log)

    async def __aenter__(self) -> Rollouter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, specs: Iterable[EnvironmentSpec]) -> None:
        """Start the workers that these environments need, where one does.

        Raises:
            SettingsError: One needs a worker and cannot have one.
            EnvironmentFailed: One cannot be loaded in a worker (inside an exception group).
        """
        names = [spec.name for spec in specs if needs_workers(spec)]
        for name in names:
            self._workers.require(name)
        await self._workers.start(names)

    async def close(self) -> None:
        """End the worker processes. No rollout may be running."""
        await self._workers.close()

    async def run(
        self,
        task: Task,
        *,
        rollout_id: RolloutId,
        group_id: GroupId,
        spec: EnvironmentSpec,
        sampling: SamplingParams,
        attempt: int = 0,
        max_turns: int | None = None,
        timeout_s: float | None = None,
        on_lost: Callable[[Rollout], None] | None = None,
    ) -> Rollout:
        """One attempt at a task, scored. `max_turns` and `timeout_s` override the settings for one environment.

        `on_lost` is told of a rollout that fails or is cancelled, with the tokens of the turns it finished.

        Cancelling this cancels the agent, its tools, its requests and its reward, and returns once they have ended: see
        `Attempts`. No request of the rollout is taken any more.

        Raises:
            RolloutError: This rollout alone is lost; the class and `reason` say how, the message names the task.
            RequestRefused: The engine cannot take one of its prompts.
            EngineFailed: No engine is left; not this rollout's fault.
        """
        clock = asyncio.get_running_loop()
        rollout = Rollout(rollout_id, group_id, task, sampling, started_s=clock.time(), attempt=attempt)
        limit_s = timeout_s or self._settings.timeout_s
        policy = self._policy(rollout, max_turns or self._settings.max_turns)
        try:
            await self._attempts.run(
                self._attempt(rollout, policy, spec, limit_s),
                what=f"task {task.task_id}: rollout {rollout_id}",
                limit_s=limit_s,
                stop=policy.stop,
            )
        except BaseException:
            if on_lost is not None:
                on_lost(rollout)
            raise
        rollout.branches = [branch for branch in rollout.branches if branch.num_completion_tokens]
        rollout.ended_s = clock.time()
        return rollout

    async def score(self, group: Group, spec: EnvironmentSpec, *, timeout_s: float | None = None) -> list[Group]:
        """Score a complete group by the environment's `score_group`, where it has one; see `scoring.score_group`.

        `timeout_s` stands in for the settings' where they have no `reward_timeout_s`. Raises `RolloutError` for the
        whole group.
        """
        if spec.score_group is None:
            return await score_group(group, spec)
        limit_s = self._settings.reward_timeout_s or timeout_s or self._settings.timeout_s

        async def scored() -> list[Group]:
            async with _blamed_on(group.task), _within(limit_s, group.task):
                return await score_group(group, spec)

        what = f"task {group.task.task_id}: score_group of group {group.group_id}"
        return await self._attempts.run(scored(), what=what, limit_s=limit_s, stop=_nothing)

    async def _attempt(self, rollout: Rollout, policy: RolloutPolicy, spec: EnvironmentSpec, limit_s: float) -> None:
        async with _blamed_on(rollout.task), _within(limit_s, rollout.task):
            returned = await self._play(rollout, policy, spec)
            rollout.reward = _saving(await self._score(rollout, spec, returned), spec.saved_columns)

    def _policy(self, rollout: Rollout, max_turns: int) -> RolloutPolicy:
        return RolloutPolicy(
            rollout,
            renderer=self._renderer,
            generate=self._generate,
            budget=RolloutBudget(
                max_turns=max_turns,
                max_rollout_tokens=self._settings.max_rollout_tokens,
                max_model_tokens=self._max_model_tokens,
            ),
            system_prompt=self._settings.system_prompt,
        )

    async def _play(self, rollout: Rollout, policy: RolloutPolicy, spec: EnvironmentSpec) -> float | Reward | None:
        """What the agent returned; None where it did not score, or ran out of budget and `spec.reward` will."""
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        try:
            return await self._agent(spec)(rollout.task, policy)
        except BudgetExceeded:
            if spec.reward is None or not rollout.messages:
                raise
            return None
        finally:
            policy.close()
            playing_s = clock.time() - started_s
            rollout.metrics["environment_s"] = max(0.0, playing_s - rollout.metrics.get("generate_s", 0.0))

    def _agent(self, spec: EnvironmentSpec) -> Agent:
        if spec.agent is not None:
            return spec.agent
        assert spec.environment is not None  # EnvironmentSpec holds exactly one of them
        factory, scored_later = spec.environment, spec.reward is not None
        if spec.trusted or _is_async_environment(factory):
            return environment_agent(
                factory,
                tools=spec.tools,
                columns=spec.columns,
                saved_columns=spec.saved_columns,
                scored_later=scored_later,
            )
        return hosted_agent(
            lambda task: WorkerEnvironment(self._workers, task),
            tools=spec.tools,
            columns=spec.columns,
            saved_columns=spec.saved_columns,
            scored_later=scored_later,
        )

    async def _score(self, rollout: Rollout, spec: EnvironmentSpec, returned: float | Reward | None) -> Reward | None:
        """The rollout's own reward; None only where `score_group` gives it later."""
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        what = f"task {rollout.task.task_id}: the reward of rollout {rollout.rollout_id}"
        if spec.reward is None:
            if returned is None and spec.score_group is not None:
                return None
            return require_reward(returned, what)
        value: object
        if spec.trusted or _is_async_function(spec.reward):
            scored = spec.reward(rollout.task, rollout.messages)
            value = await scored if inspect.isawaitable(scored) else scored
        else:
            value = await self._workers.reward(rollout.task, rollout.messages)
        rollout.metrics["score_s"] = clock.time() - started_s
        return _merged(require_reward(value, what), returned)


def _nothing() -> None:
    """There is no policy to close."""


def _saving(reward: Reward | None, saved_columns: Sequence[str] | None) -> Reward | None:
    """The reward with these columns alone, or with all of them."""
    if reward is None or saved_columns is None:
        return reward
    return replace(reward, columns={name: reward.columns[name] for name in saved_columns if name in reward.columns})


def _merged(reward: Reward, returned: float | Reward | None) -> Reward:
    """The reward function's value, with what the environment reported beside its own."""
    if not isinstance(returned, Reward):
        return reward
    return Reward(
        reward.value,
        components={**returned.components, **reward.components},
        columns={**returned.columns, **reward.columns},
    )


def needs_workers(spec: EnvironmentSpec) -> bool:
    """Whether some of its code is synchronous and not trusted, so that it must run in a worker process."""
    if spec.trusted:
        return False
    if spec.environment is not None and not _is_async_environment(spec.environment):
        return True
    return spec.reward is not None and not _is_async_function(spec.reward)


def _is_async_environment(factory: object) -> bool:
    """Whether both methods are coroutines, as far as the class tells without making an environment."""
    made = getattr(factory, "func", factory)  # of a functools.partial
    return all(inspect.iscoroutinefunction(getattr(made, method, None)) for method in ("reset", "step"))


def _is_async_function(function: object) -> bool:
    """Whether calling it gives a coroutine; an object with an async `__call__` counts."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@asynccontextmanager
async def _within(limit_s: float, task: Task) -> AsyncIterator[None]:
    """Raise `RolloutTimeout` after `limit_s`; a timeout of the user's own code stays what it is."""
    try:
        async with asyncio.timeout(limit_s) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RolloutTimeout(
            f"task {task.task_id}: not finished after {limit_s:g} s (rollouts.timeout_s); it was waiting in "
            f"{_innermost(error)}"
        ) from error


def _innermost(error: BaseException) -> str:
    """The deepest line of users' or our code that was running when a deadline passed."""
    cancelled = error.__cause__ or error
    frames = [frame for frame in traceback.extract_tb(cancelled.__traceback__) if "/asyncio/" not in frame.filename]
    return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "an unknown place"


@asynccontextmanager
async def _blamed_on(task: Task) -> AsyncIterator[None]:
    """Turn what users' code raises into `EnvironmentFailed` naming the task; let our own errors pass."""
    try:
        yield
    except RolloutError as error:
        if task.task_id in str(error):
            raise
        named = type(error)(f"task {task.task_id}: {error}")
        named.reason = error.reason
        raise named from error
    except _OURS:
        raise
    except Exception as error:
        if isinstance(error, ExceptionGroup) and (ours := _first_of_ours(error)) is not None:
            raise ours from error
        where = "".join(traceback.format_exception(error)).rstrip()
        raise EnvironmentFailed(f"task {task.task_id}: {type(error).__name__}: {error}\n{where}") from error


_OURS = (EngineFailed, TransportError, SettingsError, RolloutError, RequestRefused)
"""Errors that already say what was lost; the first of them tell of more than one rollout."""


def _first_of_ours(group: ExceptionGroup[Exception]) -> Exception | None:
    """The gravest of our own errors among those that an agent's parallel turns raised."""
    raised = list(_leaves(group))
    return next((error for kind in _OURS for error in raised if isinstance(error, kind)), None)


def _leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
