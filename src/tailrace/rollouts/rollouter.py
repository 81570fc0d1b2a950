"""One task to one finished, scored rollout; whatever goes wrong costs that rollout and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tailrace.environments import Agent, EnvironmentSettings, EnvironmentSpec
from tailrace.errors import BudgetExceeded, RequestRefused, RolloutError, ScoringFailed
from tailrace.records import Generate, Group, GroupId, Reward, Rollout, RolloutId, SamplingParams, Task
from tailrace.rollouts.agents import environment_agent, hosted_agent
from tailrace.rollouts.attempts import Attempts
from tailrace.rollouts.blame import blamed_on, within
from tailrace.rollouts.budgets import ErrorTally
from tailrace.rollouts.chat.rendering import Renderer
from tailrace.rollouts.groups import GroupScorer
from tailrace.rollouts.policy import RolloutBudget, RolloutPolicy
from tailrace.rollouts.scoring.judge import EndpointChat, EngineChat, JudgeUsage, RelativeJudge
from tailrace.rollouts.scoring.rewarding import Rewards, is_async_environment, is_async_function
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers.pool import WorkerEnvironment, WorkerPool
from tailrace.tracing.phases import phase


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
        self._rewards = Rewards(self._workers)
        self._judges: dict[str, RelativeJudge] = {}
        self._failures = ErrorTally(settings.rollout_errors, "rollouts", "rollouts.rollout_errors")
        self._scorer = GroupScorer(concurrency=settings.score_concurrency, errors=settings.score_errors)

    async def __aenter__(self) -> Rollouter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, specs: Iterable[EnvironmentSpec]) -> None:
        """Start the workers that these environments need, where one does, and make their judges.

        Raises:
            SettingsError: One needs a worker and cannot have one, or a judge has no key.
            EnvironmentFailed: One cannot be loaded in a worker (inside an exception group).
        """
        specs = list(specs)
        for spec in specs:
            self._judge(spec)
        names = [spec.name for spec in specs if needs_workers(spec)]
        for name in names:
            self._workers.require(name)
        await self._workers.start(names)

    async def close(self) -> None:
        """End the worker processes and judges' connections. No rollout may be running."""
        async with asyncio.TaskGroup() as closing:
            closing.create_task(self._workers.close())
            for judge in self._judges.values():
                closing.create_task(judge.close())

    @property
    def judge_usage(self) -> JudgeUsage:
        """What all judges took so far."""
        usage = JudgeUsage()
        for judge in self._judges.values():
            usage.add(judge.usage)
        return usage

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
            ErrorBudgetSpent: More rollouts or rewards failed than the settings allow.
        """
        clock = asyncio.get_running_loop()
        rollout = Rollout(rollout_id, group_id, task, sampling, started_s=clock.time(), attempt=attempt)
        limit_s = timeout_s or self._settings.timeout_s
        policy = self._policy(rollout, max_turns or self._settings.max_turns)
        self._failures.started += 1
        has_ended = False
        try:
            with phase("rollout", track="rollouts", about={"rollout": rollout_id, "attempt": attempt}):
                await self._attempts.run(
                    self._attempt(rollout, policy, spec, limit_s),
                    what=f"task {task.task_id}: rollout {rollout_id}",
                    limit_s=limit_s,
                    stop=policy.stop,
                )
            has_ended = True
        except (RolloutError, RequestRefused) as error:
            if not self._scorer.has_counted(error):
                self._failures.fail(error)
            raise
        finally:
            if not has_ended and on_lost is not None:
                on_lost(rollout)
        rollout.branches = [branch for branch in rollout.branches if branch.num_completion_tokens]
        rollout.ended_s = clock.time()
        return rollout

    async def score(self, group: Group, spec: EnvironmentSpec, *, timeout_s: float | None = None) -> list[Group]:
        """Score a complete group by the environment's `score_group` or judge, where it has one; see `GroupScorer`.

        `timeout_s` stands in for the settings' where they have no `reward_timeout_s`; it counts from where a place
        among `rollouts.score_concurrency` is free. Raises `RolloutError` for the whole group.
        """
        limit_s = self._settings.reward_timeout_s or timeout_s or self._settings.timeout_s
        if not spec.scores_groups:
            return await self._scorer.score(group, None)

        async def score_group(group: Group) -> Group | list[Group] | None:
            what = f"task {group.task.task_id}: score_group of group {group.group_id}"
            work = self._score_group(group, spec, limit_s)
            return await self._attempts.run(work, what=what, limit_s=limit_s, stop=_nothing)

        with phase("score_group", track="groups", about={"group": group.group_id}):
            return await self._scorer.score(group, score_group)

    async def _score_group(self, group: Group, spec: EnvironmentSpec, limit_s: float) -> Group | list[Group] | None:
        """Named functions that see the whole group first; then `score_group` or the judge, which see their rewards."""
        asked = spec.score_group or self._judge(spec)
        with blamed_on(group.task, ScoringFailed), within(limit_s, group.task):
            await self._rewards.score_together(group, spec)
            return group if asked is None else await asked(group)

    def _judge(self, spec: EnvironmentSpec) -> RelativeJudge | None:
        """The environment's judge, made when it is first needed."""
        if spec.judge is None:
            return None
        if spec.name not in self._judges:
            told = spec.judge
            chat = (
                EngineChat(self._renderer, self._generate, max_model_tokens=self._max_model_tokens)
                if told.url is None
                else EndpointChat(told.url, told.model, api_key_variable=told.api_key_variable)
            )
            self._judges[spec.name] = RelativeJudge(chat, told, form=spec.judge_format)
        return self._judges[spec.name]

    async def _attempt(self, rollout: Rollout, policy: RolloutPolicy, spec: EnvironmentSpec, limit_s: float) -> None:
        """Play a rollout, then score it, within one limit."""
        task, ends_s = rollout.task, rollout.started_s + limit_s
        with blamed_on(task), within(limit_s, task, ends_s=ends_s):
            returned = await self._play(rollout, policy, spec)
        rollout.reward = returned if isinstance(returned, Reward) else None

        async def reward() -> Reward | None:
            if not spec.scores_rollouts:  # nothing is called
                return await self._rewards.score(rollout, spec, returned)
            with blamed_on(task), within(limit_s, task, ends_s=ends_s):
                return await self._rewards.score(rollout, spec, returned)

        with phase("score"):
            await self._scorer.reward(rollout, reward)

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
            with phase("environment"):
                return await self._agent(spec)(rollout.task, policy)
        except BudgetExceeded:
            if not spec.scores_rollouts or not rollout.messages:
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
        factory, scored_later = spec.environment, spec.scores_rollouts or spec.scores_groups
        if spec.trusted or is_async_environment(factory):
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


def _nothing() -> None:
    """There is no policy to close."""


def needs_workers(spec: EnvironmentSpec) -> bool:
    """Whether some of its code is synchronous and not trusted, so that it must run in a worker process."""
    if spec.trusted:
        return False
    if spec.environment is not None and not is_async_environment(spec.environment):
        return True
    if spec.reward is not None and not is_async_function(spec.reward):
        return True
    return any(not reward.is_async for reward in spec.rewards.values())
