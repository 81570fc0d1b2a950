"""One task to one finished, scored rollout; whatever goes wrong costs that rollout and says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tailrace.environments import AgentResult, EnvironmentSpec, ScoreGroup
from tailrace.environments.outside import AnswerClient
from tailrace.environments.protocol import GroupScore
from tailrace.errors import RequestRefused, RolloutError, ScoringFailed, SettingsError
from tailrace.records import Generate, Group, GroupId, Json, Rollout, RolloutId, SamplingParams, Task
from tailrace.rollouts.agent_workers import AgentWorkers, PlayedRollout, WorkerPlace, WorkerWatch
from tailrace.rollouts.agent_workers.messages import ScoredBy
from tailrace.rollouts.attribution import attribute_errors, drop_frames
from tailrace.rollouts.chat.rendering import ChatRenderer, Renderer, RendererSource
from tailrace.rollouts.closing import close_all, played_with
from tailrace.rollouts.deadline import Attempts
from tailrace.rollouts.endpoints import Endpoints, no_endpoints
from tailrace.rollouts.environment import LoadedEnvironment
from tailrace.rollouts.error_budget import ErrorBudget, ErrorTally
from tailrace.rollouts.own_columns import require_own_column
from tailrace.rollouts.playing import RolloutPlayer, leave_out_empty_branches, limited
from tailrace.rollouts.policy import RolloutPolicy
from tailrace.rollouts.run_facts import RunFacts
from tailrace.rollouts.scoring import JudgeUsage, RelativeJudge, Scorer, Teacher, TeacherUsage
from tailrace.rollouts.scoring.scorer import ScoreRollout
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers.pool import WorkerPool
from tailrace.tracing.phases import phase

ResultT = TypeVar("ResultT")

_logger = logging.getLogger(__name__)


class Rollouter:
    """Runs and scores rollouts, any number at once, on the running event loop: the scheduler's `GroupRunner`.

    Synchronous code of environments that are not trusted runs in worker processes, which load an environment again
    from its settings. Use it as an async context manager, or `close` it.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        environments: Mapping[str, LoadedEnvironment],
        *,
        renderer: Renderer,
        generate: Generate,
        facts: RunFacts | None = None,
        teacher: Teacher | None = None,
        worker_log: Path | None = None,
        watch: WorkerWatch | None = None,
        endpoints: Endpoints | None = None,
        agent_places: Sequence[WorkerPlace] | None = None,
    ) -> None:
        """`environments` by their names, which tasks carry. A `teacher` scores every group; not in evaluations.

        `endpoints` give the policies of rollouts that are played in this process their HTTP addresses. Agent workers
        are at `agent_places`, one at each; None: they are children of this process.
        """
        facts = facts or RunFacts()
        self._settings = settings
        self._environments = environments
        self._teacher, self._takes_demonstrations = teacher, facts.takes_demonstrations
        self._attempts, self._endpoints = Attempts(), endpoints
        loadable = {name: one.settings for name, one in environments.items() if one.settings is not None}
        self._workers = WorkerPool(settings, loadable, log_path=worker_log)
        self._player = RolloutPlayer(
            settings,
            renderer=renderer,
            generate=generate,
            workers=self._workers,
            facts=facts,
            endpoints=endpoints,
        )
        apart = {name: loadable[name] for name, one in environments.items() if one.is_apart}
        self._agents: AgentWorkers | None = None
        if apart:
            self._agents = AgentWorkers(
                settings,
                apart,
                renderer=_source_of(renderer),
                generate=generate,
                watch=watch or WorkerWatch(),
                facts=facts,
                endpoints=endpoints,
                places=agent_places,
            )
        self._judges: dict[str, RelativeJudge] = {}
        self._failures = ErrorTally(settings.rollout_errors, "rollouts", "rollouts.rollout_errors")
        self._scorer = Scorer(
            concurrency=settings.score_concurrency, errors=settings.score_errors, setting="rollouts.score_errors"
        )
        self._evaluation_seed: int | None = None
        self._greedy = False
        self._scored_alone = set[str]()
        """Environments of which it was told that their held-out rollouts are scored as groups of one."""
        self._on_lost: Callable[[Rollout], None] | None = None
        self._on_ended: Callable[[RolloutId], None] | None = None

    async def __aenter__(self) -> Rollouter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def runner(
        self,
        *,
        evaluation_seed: int | None = None,
        greedy: bool = False,
        on_lost: Callable[[Rollout], None] | None = None,
        on_ended: Callable[[RolloutId], None] | None = None,
    ) -> Rollouter:
        """This rollouter for one of its users: workers, judges and error budgets are shared.

        With an `evaluation_seed` rollouts are sampled as an evaluation asks, reproducibly, or, where `greedy`, without
        chance, and failures count against no budget: the evaluation's result tells of them. `on_lost` gets rollouts
        that fail or are cancelled, with the tokens of the turns they finished; `on_ended` all whose agent has returned.
        """
        other = copy(self)
        other._evaluation_seed, other._greedy = evaluation_seed, greedy
        if evaluation_seed is not None:
            other._failures = ErrorTally(ErrorBudget(), "rollouts", "rollouts.rollout_errors")
            other._scorer = self._scorer.without_limits()
        other._on_lost, other._on_ended = on_lost, on_ended
        return other

    async def start(self) -> None:
        """Start the workers that environments need, where one does, make their judges, and wait for the teacher.

        Raises `SettingsError` where one needs a worker and cannot have one, or a judge has no key; `EnvironmentFailed`
        (inside an exception group) where one cannot be loaded in a worker.
        """
        for one in self._environments.values():
            self._judge(one.spec)
        names = [name for name, one in self._environments.items() if one.spec.needs_workers and not one.is_apart]
        for name in names:
            self._workers.require(name)
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._workers.start(names))
            if self._agents is not None:
                starting.create_task(self._agents.start())
        for name, one in self._environments.items():
            if one.is_apart and one.spec.needs_workers and await self._workers_of(one) is None:
                self._workers.require(name)
                await self._workers.start([name])
        if self._teacher is not None:
            await self._teacher.ready()

    async def close(self) -> None:
        """End worker processes, connections, endpoints and what environments hold. No rollout may be running.

        Whatever one of them raises is logged with its name, and keeps no other from its end; see `close_all`.
        """
        parts = played_with(self._workers, self._judges, self._environments, self._endpoints)
        if self._agents is not None:
            parts["the agent workers"] = self._agents.close
        if self._teacher is not None:
            parts["the teacher"] = self._teacher.close
        await close_all(parts)

    def kill(self) -> None:
        """End the worker processes at once, without waiting; a process that is stopped would stay otherwise."""
        self._workers.kill()
        if self._agents is not None:
            self._agents.kill()

    def write_stacks(self) -> None:
        """Agent workers write where they stand into their log, soon; not one that is stopped."""
        if self._agents is not None:
            self._agents.write_stacks()

    @property
    def agent_workers(self) -> AgentWorkers | None:
        """The processes that play rollouts, where some are played there."""
        return self._agents

    @property
    def judge_usage(self) -> JudgeUsage:
        """What all judges took so far."""
        usage = JudgeUsage()
        for judge in self._judges.values():
            usage.add(judge.usage)
        if self._agents is not None:
            usage.add(self._agents.judge_usage)
        return usage

    @property
    def teacher_usage(self) -> TeacherUsage:
        """What the teacher did so far."""
        return TeacherUsage() if self._teacher is None else copy(self._teacher.usage)

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int = 0) -> Rollout:
        """One attempt at a task, scored.

        Cancelling this cancels the agent, its tools, its requests and its reward, and returns once they have ended: see
        `Attempts`. No request of the rollout is taken any more.

        Raises:
            RolloutError: This rollout alone is lost; the class and `reason` say how, the message names the task.
            RequestRefused: The engine cannot take one of its prompts.
            EngineFailed: No engine is left; not this rollout's fault.
            ErrorBudgetSpent: More rollouts or rewards failed than the settings allow.
        """
        environment, clock = self._environments[task.environment], asyncio.get_running_loop().time
        sampling = self._sampling(environment, task)
        rollout = Rollout(rollout_id, group_id, task, sampling, started_s=clock(), attempt=attempt)
        self._failures.started += 1
        has_ended = False
        try:
            await self._play(rollout, environment)
            has_ended = True
        except (RolloutError, RequestRefused) as error:
            drop_frames(error)  # where users' code raised is in its text
            if isinstance(error, RolloutError) and error.is_blameless:
                self._failures.started -= 1  # it is started once more
            elif not self._scorer.has_counted(error):
                self._failures.fail(error)
            raise
        finally:
            rollout.ended_s = clock()
            if not has_ended and self._on_lost is not None:
                self._on_lost(rollout)
            if self._on_ended is not None:
                self._on_ended(rollout_id)
        leave_out_empty_branches(rollout)
        return rollout

    async def score(self, group: Group) -> list[Group]:
        """Score a complete group by what its environment has for whole groups; see `Scorer.score_group`.

        Named functions for whole groups come first, then `score_group` or the judge, which see their rewards. The time
        limit counts from where a slot among `rollouts.score_concurrency` is free; what agent workers score has all of
        it, each part by itself, from when one takes the group. In an evaluation the group is a single rollout without a
        reward of its own, which stays without one where the environment needs whole groups.

        Raises `RolloutError` for the whole group.
        """
        task, environment = group.task, self._environments[group.task.environment]
        agents = await self._workers_of(environment)
        stages = self._group_stages(environment, agents)
        if not stages:
            return await self._scorer.score_group(group)
        if self._evaluation_seed is not None:
            self._tell_of_scoring_alone(environment.spec)
            if environment.spec.needs_whole_group:
                return []

        async def deadline(work: Coroutine[Any, Any, object]) -> object:
            if agents is None:
                return await self._within_limit(work, group, environment)
            with attribute_errors(task, ScoringFailed):
                return await work

        with phase("score_group", track="groups", about={"group": group.group_id}):
            try:
                return await self._scorer.score_group(group, stages, deadline=deadline, named=environment.spec.rewards)
            except RolloutError as error:
                drop_frames(error)
                raise

    async def _within_limit(self, work: Awaitable[ResultT], group: Group, environment: LoadedEnvironment) -> ResultT:
        """What scores a group on this loop."""
        what = f"task {group.task.task_id}: score_group of group {group.group_id}"
        limit_s = environment.score_timeout.limit_s
        return await self._attempts.run(limited(work, group, environment), what=what, limit_s=limit_s)

    def _tell_of_scoring_alone(self, spec: EnvironmentSpec) -> None:
        if spec.name not in self._scored_alone:
            self._scored_alone.add(spec.name)
            _logger.warning(
                "environment %r gives held-out rollouts no reward of their own, and each task is played once: %s",
                spec.name,
                "it needs whole groups, so that they stay without a reward"
                if spec.needs_whole_group
                else "what scores groups sees a single rollout, so that what it compares says nothing there",
            )

    async def _play(self, rollout: Rollout, environment: LoadedEnvironment) -> None:
        """Play a rollout where its environment belongs, then score it, within one limit.

        The phases `rollout` and `score` are those of the process that plays it: this one, or an agent worker.
        """
        agents = await self._workers_of(environment)
        about: dict[str, Json] = {"rollout": rollout.rollout_id, "attempt": rollout.attempt}
        with phase("rollout" if agents is None else "wait_for_worker", track="rollouts", about=about):
            if agents is None:
                await self._play_here(rollout, environment)
                return
            played = await self._play_apart(agents, rollout, environment)

            async def scored(rollout: Rollout, reported: AgentResult) -> AgentResult:
                return played.scored_or_raise()

            await self._score(rollout, environment.spec, played.reported, scored)

    async def _play_apart(
        self, agents: AgentWorkers, rollout: Rollout, environment: LoadedEnvironment
    ) -> PlayedRollout:
        """In an agent worker; clients outside claim their rollouts here first, so that one place has them all."""
        if not environment.is_outside:
            return await agents.play(rollout, is_evaluation=self._evaluation_seed is not None)
        if self._endpoints is None:
            raise no_endpoints(environment.spec.name)
        played = None
        while played is None:
            async with self._endpoints.claimed(environment.offer(rollout.task)) as tell:
                played = await self._play_claimed(agents, rollout, tell)
        return played

    async def _play_claimed(self, agents: AgentWorkers, rollout: Rollout, tell: AnswerClient) -> PlayedRollout | None:
        """None where its client had gone before it could be told where that is."""
        has_gone = False

        def told(answer: bytes) -> bool:
            nonlocal has_gone
            if not tell(answer) and not playing.cancelling():
                has_gone = playing.cancel()
            return not has_gone

        is_evaluation = self._evaluation_seed is not None
        playing = asyncio.create_task(agents.play(rollout, is_evaluation=is_evaluation, tell=told))
        try:
            return await playing
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if not has_gone or (own is not None and own.cancelling()):
                raise
            return None

    async def _play_here(self, rollout: Rollout, environment: LoadedEnvironment) -> None:
        policy = self._player.policy(rollout, environment, is_evaluation=self._evaluation_seed is not None)
        await self._attempts.run(
            self._attempt(rollout, policy, environment),
            what=f"task {rollout.task.task_id}: rollout {rollout.rollout_id}",
            limit_s=environment.deadline.limit_s,
            stop=policy.stop,
        )

    async def _attempt(self, rollout: Rollout, policy: RolloutPolicy, environment: LoadedEnvironment) -> None:
        reported = await self._player.play(rollout, policy, environment)

        async def scored(rollout: Rollout, reported: AgentResult) -> AgentResult:
            return await self._player.score(rollout, reported, environment)

        with phase("score"):
            functions = scored if environment.spec.scores_rollouts else None
            await self._score(rollout, environment.spec, reported, functions)

    async def _score(
        self, rollout: Rollout, spec: EnvironmentSpec, reported: AgentResult, scored: ScoreRollout | None
    ) -> None:
        """Set the reward: what was reported, or what is `scored` in its place."""
        await self._scorer.score_rollout(rollout, reported, scored, is_group_scored=spec.scores_groups)

    async def _workers_of(self, environment: LoadedEnvironment) -> AgentWorkers | None:
        """Those that play its rollouts; None where that is here."""
        if self._agents is None or not environment.is_apart:
            return None
        return self._agents if await self._agents.loads(environment.spec.name) else None

    def _group_stages(self, environment: LoadedEnvironment, agents: AgentWorkers | None) -> list[ScoreGroup]:
        spec = environment.spec
        stages: list[ScoreGroup] = []
        if self._teacher is not None and self._evaluation_seed is None:
            stages.append(self._teacher if agents is None else partial(self._limited, self._teacher, environment))
        if any(reward.together for reward in spec.rewards.values()):
            here = partial(self._player.functions.score_group, spec=spec)
            stages.append(self._scored_in(agents, ScoredBy.REWARDS, here, environment))
        if spec.score_group is not None:
            own = self._scored_in(agents, ScoredBy.SCORE_GROUP, spec.score_group, environment)
            stages.append(partial(self._score_by_own, own))
        elif (judge := self._judge(spec)) is not None:
            stages.append(self._scored_in(agents, ScoredBy.JUDGE, judge, environment))
        return stages

    def _scored_in(
        self, agents: AgentWorkers | None, by: ScoredBy, here: ScoreGroup, environment: LoadedEnvironment
    ) -> ScoreGroup:
        """By `agents`, or `here` where there are none, or they can load what scores no more."""
        if agents is None:
            return here

        async def score(group: Group) -> GroupScore:
            scored = await agents.score(group, by=by)
            return await self._limited(here, environment, group) if scored is None else scored

        return score

    async def _limited(self, here: ScoreGroup, environment: LoadedEnvironment, group: Group) -> GroupScore:
        """A stage on this loop among those of agent workers, which have limits of their own."""
        return await self._within_limit(here(group), group, environment)

    async def _score_by_own(self, score_group: ScoreGroup, group: Group) -> GroupScore:
        """What an environment's own `score_group` returns. Raises for columns as `require_own_column` does."""
        rollouts = list(group.rollouts)
        before = _columns_of(rollouts)
        returned = await score_group(group)
        takes_demonstrations = self._takes_demonstrations if self._evaluation_seed is None else None
        for name in _columns_of(rollouts) - before:
            require_own_column(name, environment=group.task.environment, takes_demonstrations=takes_demonstrations)
        return returned

    def _judge(self, spec: EnvironmentSpec) -> RelativeJudge | None:
        """The environment's judge, made when it is first needed."""
        settings = spec.judge
        if settings is not None and spec.name not in self._judges:
            chat = self._player.judge_chat(spec)
            self._judges[spec.name] = RelativeJudge(chat, settings, form=spec.judge_format)
        return self._judges.get(spec.name)

    def _sampling(self, environment: LoadedEnvironment, task: Task) -> SamplingParams:
        if self._evaluation_seed is None:
            return environment.sampling
        return self._settings.evaluation_sampling(
            seed=(self._evaluation_seed + task.index) % 2**31,
            max_tokens=environment.sampling.max_tokens,
            greedy=self._greedy,
        )


def _columns_of(rollouts: Sequence[Rollout]) -> set[str]:
    """Names of all columns that their branches have."""
    return {name for rollout in rollouts for branch in rollout.branches for name in branch.columns}


def _source_of(renderer: Renderer) -> RendererSource:
    """What agent workers make the same renderer of. Raises `SettingsError` where they cannot."""
    if isinstance(renderer, ChatRenderer):
        return renderer.source
    raise SettingsError(
        f"agent workers make their renderer of a model's folder, and cannot of a {type(renderer).__name__}: write "
        "rollouts.agent_workers = 0"
    )
