"""Plays rollouts on the running event loop: agents, environments, and the reward functions of single rollouts.

The same code runs in the orchestrator and in agent worker processes; who may fail how often is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

import msgspec

from tailrace.environments import Agent, AgentResult, EnvironmentSpec, Policy
from tailrace.environments.callables import is_async_environment
from tailrace.environments.outside import AnswerClient, OutsideAgent
from tailrace.environments.programs import CommandAgent
from tailrace.environments.results import as_agent_result
from tailrace.errors import BudgetExceeded, RolloutError, RolloutTimeout, ScoringFailed
from tailrace.records import Generate, Group, Rollout, Task
from tailrace.rollouts.agents import LocalEnvironment, play_environment
from tailrace.rollouts.attribution import attribute_errors
from tailrace.rollouts.chat.rendering import Renderer
from tailrace.rollouts.deadline import rollout_deadline
from tailrace.rollouts.endpoints import Endpoints
from tailrace.rollouts.environment import LoadedEnvironment
from tailrace.rollouts.policy import RolloutPolicy
from tailrace.rollouts.run_facts import RunFacts
from tailrace.rollouts.scoring import RewardFunctions
from tailrace.rollouts.scoring.judge import Chat, EndpointChat, EngineChat
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers.pool import WorkerEnvironment, WorkerPool
from tailrace.tracing.phases import phase

ResultT = TypeVar("ResultT")


class RolloutPlayer:
    """Plays a rollout to its end, and says what it reported and what reward functions make of it."""

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        renderer: Renderer,
        generate: Generate,
        workers: WorkerPool,
        facts: RunFacts,
        endpoints: Endpoints | None = None,
    ) -> None:
        """Synchronous code that is not trusted runs in the `workers`. The rest is as `Rollouter` takes it."""
        self._settings, self._renderer, self._generate = settings, renderer, generate
        self._workers, self._facts, self._endpoints = workers, facts, endpoints
        self.functions = RewardFunctions(workers, max_steps=facts.max_steps)

    def policy(self, rollout: Rollout, environment: LoadedEnvironment, *, is_evaluation: bool) -> RolloutPolicy:
        """The policy of one rollout, which it fills."""
        return RolloutPolicy(
            rollout,
            renderer=self._renderer,
            generate=self._generate,
            max_turns=environment.max_turns,
            max_rollout_tokens=self._settings.max_rollout_tokens,
            max_model_tokens=self._facts.max_model_tokens,
            row_tokens=self._facts.row_tokens,
            system_prompt=self._settings.system_prompt,
            records_experts=self._facts.records_experts,
            takes_demonstrations=None if is_evaluation else self._facts.takes_demonstrations,
            endpoints=self._endpoints,
        )

    async def play(
        self,
        rollout: Rollout,
        policy: RolloutPolicy,
        environment: LoadedEnvironment,
        *,
        tell: AnswerClient | None = None,
    ) -> AgentResult:
        """Run the agent to its end, within the environment's limit; what it reported.

        `tell` answers the client outside that has claimed it already; None: one may claim it here.

        Raises `RolloutError`, `RequestRefused` where the engine cannot take a prompt, and what concerns more than it;
        `BudgetExceeded` for an agent that was given empty replies alone, whatever it made of them.
        """
        spec, task, limit = environment.spec, rollout.task, environment.deadline
        clock = asyncio.get_running_loop().time
        agent, started_s = self._agent(environment, tell), clock()
        try:
            with (
                attribute_errors(task),
                rollout_deadline(limit, task, ends_s=rollout.started_s + limit.limit_s),
                phase("environment"),
            ):
                reported = as_agent_result(await agent(task, policy)).with_info_keys(spec.info_keys)
        except BudgetExceeded:
            if not spec.scores_rollouts or not rollout.messages:
                raise
            return AgentResult()
        except RolloutTimeout:  # it may have waited for a reply
            raise
        except RolloutError as error:
            if (why := _why_unanswered(policy)) is not None:
                raise why.saying(f"{why}\n{error}") from error
            raise
        finally:
            policy.close()
            rollout.metrics["environment_s"] = max(0.0, clock() - started_s - rollout.metrics.get("generate_s", 0.0))
        if (why := _why_unanswered(policy)) is not None:
            raise why
        return reported

    async def score(self, rollout: Rollout, reported: AgentResult, environment: LoadedEnvironment) -> AgentResult:
        """What reward functions say in place of what was `reported`, within what is left of the limit.

        Raises as `RewardFunctions.score_rollout` does.
        """
        task, limit = rollout.task, environment.timeout
        ends_s = None if environment.is_outside else rollout.started_s + limit.limit_s
        with attribute_errors(task), rollout_deadline(limit, task, ends_s=ends_s):
            return await self.functions.score_rollout(rollout, reported, environment.spec)

    def judge_chat(self, spec: EnvironmentSpec, *, generate: Generate | None = None, name: str = "judge") -> Chat:
        """The model that an environment's judge asks: `generate`, or the player's own, unless it is at an endpoint.

        `name` tells its requests from others. Raises `SettingsError` where its key is missing.
        """
        settings = spec.judge
        assert settings is not None  # it is called for environments that have a judge
        if settings.url is not None:
            return EndpointChat(settings.url, settings.model, api_key_variable=settings.api_key_variable)
        most = self._facts.max_model_tokens
        return EngineChat(self._renderer, generate or self._generate, max_model_tokens=most, name=name)

    def _agent(self, environment: LoadedEnvironment, tell: AnswerClient | None) -> Agent:
        spec = environment.spec
        if isinstance(spec.agent, OutsideAgent):
            return partial(_play_outside, agent=spec.agent, environment=environment, tell=tell)
        if isinstance(spec.agent, CommandAgent):
            is_apart = spec.agent.needs_worker and not spec.trusted
            needs_reward = not (spec.scores_rollouts or spec.scores_groups)
            score = self._workers.program_reward if is_apart else None
            return partial(spec.agent.play, score=score, needs_reward=needs_reward)
        if spec.agent is not None:
            return spec.agent
        factory = spec.environment
        assert factory is not None  # EnvironmentSpec holds exactly one of them
        if spec.trusted or is_async_environment(factory):
            return partial(play_environment, spec=spec, host=lambda task: LocalEnvironment(factory))
        return partial(play_environment, spec=spec, host=partial(WorkerEnvironment, self._workers))


def _why_unanswered(policy: RolloutPolicy) -> BudgetExceeded | None:
    """Why an agent over HTTP that never had a reply had none; None: it had one, or did not ask in vain."""
    return None if policy.messages else policy.no_budget


async def limited(work: Awaitable[ResultT], group: Group, environment: LoadedEnvironment) -> ResultT:
    """What scores a group, within its environment's limit. Raises `RolloutError` for the whole group."""
    with attribute_errors(group.task, ScoringFailed), rollout_deadline(environment.score_timeout, group.task):
        return await work


async def _play_outside(
    task: Task, policy: Policy, *, agent: OutsideAgent, environment: LoadedEnvironment, tell: AnswerClient | None
) -> AgentResult:
    return await agent.play(policy, environment.offer(task, tell))


def leave_out_empty_branches(rollout: Rollout) -> None:
    """A rollout that has ended keeps branches with something to learn from."""
    kept = [place for place, one in enumerate(rollout.branches) if one.num_completion_tokens or one.num_weighted]
    rollout.branches = [rollout.branches[place] for place in kept]
    if (first := rollout.first_reply) is not None:
        branch = kept.index(first.branch) if first.branch in kept else None
        rollout.first_reply = msgspec.structs.replace(first, branch=branch)
