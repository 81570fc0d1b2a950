"""How rollouts are run: sampling, limits, error budgets, worker processes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from tailrace.records import SamplingParams
from tailrace.rollouts.error_budget import ErrorBudget

WIDEST_NUCLEUS = 4096
"""Tokens that a nucleus has at most where rollouts are trained on: each sampled token brings all of it with it."""


MOST_AGENT_WORKERS = 256
"""More than any machine has cores for, beside engines and trainer."""


class EvaluationSampling(BaseModel, extra="forbid", frozen=True):
    """How replies are sampled when a policy is measured, not trained."""

    temperature: float = Field(1.0, ge=0, description="Logits are divided by it; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens up to this probability; 1: all.")
    top_k: int = Field(0, ge=0, description="Keep this many of the likeliest tokens; 0 keeps all.")


class RolloutSettings(BaseModel, extra="forbid", frozen=True):
    """Section `rollouts`."""

    group_size: int = Field(8, ge=1, le=2**20, description="Rollouts of one task, scored together.")
    temperature: float = Field(1.0, gt=0, description="Of training rollouts: logits are divided by it.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Of training rollouts: keep the likeliest tokens up to this probability, 4,096 at most unless "
        "top_k says otherwise; the trainer renormalises over what was kept. 1: all.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=2**16,
        description="Of training rollouts: keep this many of the likeliest tokens, over which the trainer "
        "renormalises; 0 keeps all.",
    )
    max_tokens: int = Field(256, ge=1, le=2**24, description="Tokens of one completion at most.")
    max_turns: int = Field(16, ge=1, description="Completions of one rollout at most, over all its branches.")
    max_rollout_tokens: int | None = Field(
        None,
        ge=2,
        description="Tokens of one rollout at most, over all branches but those that are demonstrated. Unset: each "
        "branch has its context's limit alone.",
    )
    timeout_s: float = Field(600.0, gt=0, description="Seconds one rollout may take, reward included.")
    reward_timeout_s: float | None = Field(None, gt=0, description="Seconds for `score_group`. Unset: as `timeout_s`.")
    score_concurrency: int = Field(64, ge=0, description="Groups scored at once at most; 0: all.")
    rollout_errors: ErrorBudget = Field(ErrorBudget(), description="Rollouts that fail while they are played.")
    score_errors: ErrorBudget = Field(ErrorBudget(), description="Rewards and groups' scores that fail, each apart.")
    workers: int = Field(1, ge=0, le=1024, description="Processes for synchronous code that is not trusted; 0: none.")
    worker_timeout_s: float = Field(60.0, gt=0, description="Seconds per call, after which the worker is killed.")
    worker_start_timeout_s: float = Field(120.0, gt=0, description="Seconds to start and load an environment.")
    agent_workers: int | Literal["auto"] = Field(
        "auto",
        description="Processes in which agents and environments run, on the nodes of placement = 'ray'; 0: they run "
        "beside the scheduler; auto: one there, for environments whose code is not built in, unless placement = "
        "'inline' or no other process can load them.",
    )
    agent_block_s: float = Field(
        20.0, gt=0, description="Seconds that a coroutine may hold an agent worker's loop; then the worker is killed."
    )
    system_prompt: str | None = Field(None, description="Replaces the system message. Unset: the environment's own.")
    thinking_retention: Literal["all", "template"] = Field(
        "all",
        description="For model families with a renderer of their own: `all` keeps earlier turns' reasoning, and the "
        "rollout one growing branch; `template` strips it as their template does, at one branch per user turn.",
    )
    evaluation: EvaluationSampling = Field(EvaluationSampling(), description="In `tailrace eval` and evaluations.")

    @field_validator("agent_workers", mode="before")
    @classmethod
    def _require_a_number_of_workers(cls, given: object) -> object:
        """Before the two types are tried, each of which would complain for itself. A switch is refused elsewhere."""
        is_number = given is True or (str(given).isdecimal() and int(str(given)) <= MOST_AGENT_WORKERS)
        if given != "auto" and not is_number:
            raise ValueError(
                f"rollouts.agent_workers is {given}; it must be auto, or a number of processes from 0 to "
                f"{MOST_AGENT_WORKERS}"
            )
        return given

    @model_validator(mode="after")
    def _require_a_choice(self) -> RolloutSettings:
        if self.top_k == 1:
            raise ValueError(
                "rollouts.top_k is 1, which leaves one token of probability 1 and so nothing to learn from; write 2 or "
                "more, or 0 for all"
            )
        return self

    @model_validator(mode="after")
    def _require_room_for_one_turn(self) -> RolloutSettings:
        if self.max_rollout_tokens is not None and self.max_rollout_tokens <= self.max_tokens:
            raise ValueError(
                f"rollouts.max_rollout_tokens is {self.max_rollout_tokens}, which leaves no room for a prompt beside "
                f"one completion of rollouts.max_tokens = {self.max_tokens}; raise the first or lower the second"
            )
        return self

    @property
    def num_agent_workers(self) -> int:
        """Processes, where environments are played in any."""
        return 1 if self.agent_workers == "auto" else self.agent_workers

    @property
    def hosted_worker_names(self) -> tuple[str, ...]:
        """Of agent workers that are roles on a cluster's nodes: a number of them. `auto` is one beside the scheduler.

        >>> RolloutSettings(agent_workers=2).hosted_worker_names
        ('agent-worker-0', 'agent-worker-1')
        >>> RolloutSettings().hosted_worker_names
        ()
        """
        count = 0 if self.agent_workers == "auto" else self.agent_workers
        return tuple(f"agent-worker-{number}" for number in range(count))

    @property
    def restricts(self) -> bool:
        """Whether training rollouts are sampled from a part of the vocabulary, which the trainer has to know then."""
        return self.top_p < 1 or self.top_k > 0

    def training_sampling(self, *, temperature: float | None = None, max_tokens: int | None = None) -> SamplingParams:
        """Of a training rollout. The arguments override the settings'."""
        return SamplingParams(
            temperature=temperature or self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or (WIDEST_NUCLEUS if self.top_p < 1 else 0),
            returns_supports=self.restricts,
            max_tokens=max_tokens or self.max_tokens,
        )

    def evaluation_sampling(
        self, *, seed: int | None = None, max_tokens: int | None = None, greedy: bool = False
    ) -> SamplingParams:
        """Of a rollout that is measured and never trained on. `max_tokens` and `greedy` override the settings."""
        chosen = EvaluationSampling(temperature=0.0) if greedy else self.evaluation
        return SamplingParams(**chosen.model_dump(), max_tokens=max_tokens or self.max_tokens, seed=seed)


def top_k_setting(sampling: SamplingParams) -> int:
    """The `rollouts.top_k` that sampling comes from: 0 where it has one that only bounds a nucleus.

    >>> top_k_setting(RolloutSettings(top_p=0.95).training_sampling()), top_k_setting(SamplingParams(top_k=20))
    (0, 20)
    """
    return 0 if sampling.top_p < 1 and sampling.top_k == WIDEST_NUCLEUS else sampling.top_k
