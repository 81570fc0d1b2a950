"""An environment as rollouts are run in it: its spec, with the settings that concern it resolved."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.environments import EnvironmentSettings, EnvironmentSpec
from tailrace.environments.outside import AnswerClient, Offer, OutsideAgent
from tailrace.records import Json, SamplingParams, Task
from tailrace.rollouts.deadline import TimeLimit
from tailrace.rollouts.settings import RolloutSettings

_AGES_S = 3.0e8
"""Ten years: as long as event loops can wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEnvironment:
    """An environment's spec, and how its rollouts are run."""

    spec: EnvironmentSpec
    settings: EnvironmentSettings | None
    """What it was loaded from, and can be loaded from again in a worker process; None: it came as a spec."""
    group_size: int
    weight: float
    """Share among the tasks that are trained on, relative."""
    sampling: SamplingParams
    """Of training rollouts."""
    max_turns: int
    timeout: TimeLimit
    """Of one rollout, its reward included."""
    is_apart: bool = False
    """Whether its rollouts are played in agent workers."""
    stays_because: str = ""
    """Why they are not, although it is code of the user's own and the settings leave the choice; empty: no such why."""
    score_timeout: TimeLimit
    """Of the score of one group, from when it has its turn; of each part that an agent worker scores, from when that
    takes it."""

    @property
    def is_outside(self) -> bool:
        """Whether its rollouts wait for clients outside, so that their time counts from when they are claimed."""
        return isinstance(self.spec.agent, OutsideAgent)

    @property
    def deadline(self) -> TimeLimit:
        """From when a rollout is admitted, or, where it is played in an agent worker, from when one takes it."""
        return self.timeout._replace(limit_s=_AGES_S) if self.is_outside else self.timeout

    def offer(self, task: Task, tell: AnswerClient | None = None) -> Offer:
        """What a client outside may claim, of an environment for those. `tell` is as `Offer` has it."""
        assert isinstance(self.spec.agent, OutsideAgent)
        limits: dict[str, Json] = {
            "max_turns": self.max_turns,
            "max_tokens": self.sampling.max_tokens,
            "timeout_s": self.timeout.limit_s,
        }
        return Offer(task, self.spec.agent.lease_s, self.timeout.limit_s, limits, tell)

    @classmethod
    def of(
        cls,
        spec: EnvironmentSpec,
        rollouts: RolloutSettings,
        settings: EnvironmentSettings | None = None,
        *,
        is_apart: bool = False,
        stays_because: str = "",
    ) -> LoadedEnvironment:
        """The environment's own settings where they say something, else those of the section `rollouts`."""
        own = settings or EnvironmentSettings(name=spec.name)
        timeout = TimeLimit(rollouts.timeout_s, "rollouts.timeout_s")
        if own.timeout_s:
            timeout = TimeLimit(own.timeout_s, "environment.timeout_s")
        score_timeout = timeout
        if rollouts.reward_timeout_s:
            score_timeout = TimeLimit(rollouts.reward_timeout_s, "rollouts.reward_timeout_s")
        return cls(
            spec=spec,
            settings=settings,
            group_size=own.group_size or rollouts.group_size,
            weight=own.weight,
            sampling=rollouts.training_sampling(temperature=own.temperature, max_tokens=own.max_tokens),
            max_turns=own.max_turns or rollouts.max_turns,
            timeout=timeout,
            is_apart=is_apart,
            stays_because=stays_because,
            score_timeout=score_timeout,
        )
