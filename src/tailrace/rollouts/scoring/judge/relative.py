"""Has a model score a group, until the answer is valid or the calls are used up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tailrace.environments import AgentResult, JudgeFormat, JudgeSettings
from tailrace.environments.judge import RUBRIC
from tailrace.errors import ChatFailed, JudgeFailed
from tailrace.records import Group, Message, Rollout
from tailrace.rollouts.scoring.judge.chat import Chat, ChatAnswer
from tailrace.rollouts.scoring.judge.ranking import ScoresById, valid_score
from tailrace.rollouts.scoring.usage import JudgeUsage
from tailrace.timeouts import timeout


class RelativeJudge:
    """A `score_group` that calls `chat`; the same judge may score any number of groups at once.

    A rollout's reward becomes `weight` × score + `own_weight` × its own reward. The components `judge` and (where it
    had one) `own` tell them apart; what came with its own reward is kept.
    """

    def __init__(self, chat: Chat, settings: JudgeSettings | None = None, *, form: JudgeFormat | None = None) -> None:
        """`form`: the form of prompt and answer; None: scores by id, as JSON."""
        self.usage = JudgeUsage()
        self._chat = chat
        self._settings = settings or JudgeSettings()
        self._form = form or ScoresById()

    async def __call__(self, group: Group) -> list[AgentResult]:
        """One result per rollout. Raises `JudgeFailed` when no call brought valid scores."""
        spent = JudgeUsage()
        try:
            scores = await self._scores(group, spent)
        finally:
            self.usage.add(spent)
            group.metrics.update(spent.metrics())
        return [self._result(rollout, score) for rollout, score in zip(group.rollouts, scores, strict=True)]

    async def close(self) -> None:
        """Close the chat's connections."""
        await self._chat.close()

    async def _scores(self, group: Group, spent: JudgeUsage) -> Sequence[float]:
        """Call until an answer is valid. Waits for the model, and before a retry of one that failed."""
        settings, failure, is_away = self._settings, "", False
        prompt = self._form.prompt(group, settings.rubric or RUBRIC)
        while spent.calls <= settings.retries:
            pause_s = 0.0
            spent.retries += spent.calls > 0
            spent.calls += 1
            try:
                answer = await self._answer(prompt, spent)
                return self._valid(self._form.scores(answer.content, group), group)
            except TimeoutError:
                failure, is_away = f"no answer within {settings.timeout_s:g} s (judge.timeout_s)", True
            except JudgeFailed as error:
                failure, is_away = str(error), False
            except ChatFailed as error:
                failure, is_away = str(error), error.may_recover
                pause_s = max(error.pause_s, settings.retry_pause_s * 2 ** (spent.calls - 1))
                if not error.may_recover:
                    break
            if pause_s and spent.calls <= settings.retries:
                await asyncio.sleep(pause_s)
        spent.failed_groups = 1
        failed = JudgeFailed(
            f"task {group.task.task_id}: the judge gave no valid scores in {spent.calls} calls; the last: {failure}"
        )
        failed.may_pass = is_away
        raise failed

    async def _answer(self, prompt: Sequence[Message], spent: JudgeUsage) -> ChatAnswer:
        settings = self._settings
        async with timeout(settings.timeout_s):
            answer = await self._chat(prompt, max_tokens=settings.max_tokens, temperature=settings.temperature)
        spent.prompt_tokens += answer.prompt_tokens
        spent.completion_tokens += answer.completion_tokens
        spent.cost += answer.prompt_tokens * settings.prompt_price / 1e6
        spent.cost += answer.completion_tokens * settings.completion_price / 1e6
        return answer

    def _valid(self, scores: Sequence[float], group: Group) -> list[float]:
        if len(scores) != len(group.rollouts):
            raise JudgeFailed(f"{len(scores)} scores for {len(group.rollouts)} rollouts")
        return [valid_score(score, r.rollout_id) for score, r in zip(scores, group.rollouts, strict=True)]

    def _result(self, rollout: Rollout, score: float) -> AgentResult:
        own, reward = rollout.reward, self._settings.weight * score
        if own is None:
            return AgentResult(reward, {"judge": score})
        return AgentResult(reward + self._settings.own_weight * own.value, {"judge": score, "own": own.value})
