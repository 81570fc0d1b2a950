"""Results by an environment's reward functions: of one function, or the weighted sum of several in TRL's form.

Coroutines run on the event loop. Synchronous functions run in worker processes, which are killed when a call takes too
long (a checker that holds the interpreter lock for seconds stalls nothing but its own process), unless trusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tailrace.environments import AgentResult, EnvironmentSpec, NamedReward
from tailrace.environments.callables import is_async, settled
from tailrace.environments.named_rewards import ScoredRollout, TrainerState, checked_values, weighted_sum
from tailrace.environments.results import as_agent_result
from tailrace.records import FirstReply, Group, Message, Rollout, Task
from tailrace.rollouts.scoring.scorer import missing_reward
from tailrace.rollouts.workers.pool import WorkerPool

_logger = logging.getLogger(__name__)


class RewardFunctions:
    """Calls the reward functions of environments, for one rollout or for all of a group together."""

    def __init__(self, workers: WorkerPool, *, max_steps: int = 0) -> None:
        """`max_steps` is the trainer's last step, which functions in TRL's form are told; 0: there is none."""
        self._workers, self._max_steps = workers, max_steps
        self._replacing = set[str]()
        """Environments of which it was told that the weighted sum takes the place of what they report."""

    async def score_rollout(self, rollout: Rollout, reported: AgentResult, spec: EnvironmentSpec) -> AgentResult:
        """What the functions for single rollouts say, in place of the reward that was `reported`.

        Raises what a function raises, `RolloutTimeout` where its worker had to be killed, and `InvalidReward`.
        """
        clock = asyncio.get_running_loop().time
        since = clock()
        if spec.reward is not None and (spec.trusted or is_async(spec.reward)):
            result = as_agent_result(await settled(spec.reward(rollout.task, rollout.messages)))
        elif spec.reward is not None:
            result = await self._workers.reward(rollout.task, rollout.messages)
        else:
            alone = {name: reward for name, reward in spec.rewards.items() if not reward.together}
            (result,) = await self._weighted(rollout.task, [rollout], alone, spec)
            if not (spec.adds_rewards or reported.reward is None):
                self._tell_of_replacing(spec)
        rollout.metrics["score_s"] = clock() - since
        if spec.adds_rewards and reported.reward is not None:
            result = replace(result, reward=reported.reward + (result.reward or 0.0))
        if result.reward is None and spec.rewards and not spec.scores_groups:
            raise missing_reward(rollout, spec.rewards)
        return result.over(reported).with_info_keys(spec.info_keys)

    def _tell_of_replacing(self, spec: EnvironmentSpec) -> None:
        if spec.name not in self._replacing:
            self._replacing.add(spec.name)
            _logger.warning(
                "environment %r reports rewards of its own, which are not used: the weighted sum of %s takes their "
                "place",
                *(spec.name, ", ".join(spec.rewards)),
            )

    async def score_group(self, group: Group, spec: EnvironmentSpec) -> list[AgentResult]:
        """What the functions for whole groups add to each rollout's own reward. Raises as `score_rollout` does."""
        together = {name: reward for name, reward in spec.rewards.items() if reward.together}
        added = await self._weighted(group.task, group.rollouts, together, spec)
        return [
            result
            if result.reward is None or rollout.reward is None
            else replace(result, reward=rollout.reward.value + result.reward)
            for rollout, result in zip(group.rollouts, added, strict=True)
        ]

    async def _weighted(
        self,
        task: Task,
        rollouts: Sequence[Rollout],
        rewards: Mapping[str, NamedReward],
        spec: EnvironmentSpec,
    ) -> list[AgentResult]:
        """One sum per rollout. All functions at once: the asynchronous ones here, the others in a worker."""
        tasks, shown = [task] * len(rollouts), [_shown(rollout) for rollout in rollouts]
        state = TrainerState(max((_newest_version(rollout) for rollout in rollouts), default=0), self._max_steps)
        apart = [name for name, reward in rewards.items() if not (spec.trusted or is_async(reward.function))]
        async with asyncio.TaskGroup() as scoring:
            here = {
                name: scoring.create_task(settled(reward.call(tasks, shown, state)))
                for name, reward in rewards.items()
                if name not in apart
            }
            there = scoring.create_task(self._workers.named_rewards(task, shown, apart, state)) if apart else None
        returned = {name: call.result() for name, call in here.items()} | dict(there.result() if there else {})
        values = {name: checked_values(returned[name], len(rollouts), name) for name in rewards}
        return [
            weighted_sum({name: values[name][index] for name in rewards}, rewards) for index in range(len(rollouts))
        ]


def _shown(rollout: Rollout) -> ScoredRollout:
    """What named functions see of it: its conversation, as sampled, and the tokens of the branch that holds it."""
    first, texts = rollout.first_reply or _guessed_first_reply(rollout), rollout.sampled_texts
    messages: list[Message] = [
        {"role": message["role"], "content": texts[place]} if place in texts else message
        for place, message in enumerate(rollout.messages)
    ]
    if first.branch is None:
        return ScoredRollout(messages, first.message)
    token_ids = rollout.branches[first.branch].token_ids[first.token :]
    return ScoredRollout(messages, first.message, token_ids.tobytes())


def _guessed_first_reply(rollout: Rollout) -> FirstReply:
    """Where nobody kept it (rollouts that others made, captures of earlier versions): by roles, on the last branch."""
    roles = [message["role"] for message in rollout.messages]
    message = roles.index("assistant") if "assistant" in roles else len(roles)
    if not rollout.branches:
        return FirstReply(message, None, 0)
    branch = rollout.branches[-1]
    token = int(branch.loss_mask.argmax()) if branch.num_completion_tokens else branch.num_tokens
    return FirstReply(message, len(rollout.branches) - 1, token)


def _newest_version(rollout: Rollout) -> int:
    """Of the weights that sampled its tokens."""
    return max((version for branch in rollout.branches for version in branch.version_counts), default=0)
