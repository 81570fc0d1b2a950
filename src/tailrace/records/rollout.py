"""One attempt of the policy at a task, and the rollouts of one task that are scored together."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from tailrace.records.arrays import Float32Array
from tailrace.records.branch import Branch
from tailrace.records.conversation import Json, Message
from tailrace.records.ids import GroupId, RolloutId
from tailrace.records.sampling import SamplingParams
from tailrace.records.task import Task


@dataclass(frozen=True, slots=True)
class Reward:
    """A rollout's score. Agents may return a plain float instead."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    """What the value was made of, by name; become metrics."""
    columns: dict[str, Json] = field(default_factory=dict)
    """Anything JSON-friendly to save beside the rollout (an environment's state)."""


class TerminalState(enum.StrEnum):
    """How a rollout ends. Every admitted rollout ends in exactly one of these."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(msgspec.Struct, frozen=True):
    """A rollout's terminal state, with the step that trained it or the reason it was not."""

    state: TerminalState
    reason: str = ""
    step: int = -1

    @classmethod
    def trained(cls, step: int) -> Outcome:
        """Its tokens were in the batch of `step`."""
        return cls(TerminalState.TRAINED, step=step)

    @classmethod
    def filtered(cls, reason: str) -> Outcome:
        """It finished, and nothing in it was worth training on."""
        return cls(TerminalState.FILTERED, reason)

    @classmethod
    def failed(cls, reason: str) -> Outcome:
        """It could not finish."""
        return cls(TerminalState.FAILED, reason)

    @classmethod
    def cancelled(cls, reason: str) -> Outcome:
        """Somebody stopped it."""
        return cls(TerminalState.CANCELLED, reason)


class FirstReply(msgspec.Struct, frozen=True):
    """Where the conversation that a rollout is about stops being the prompt: at the first reply of the policy."""

    message: int
    """Its place in the rollout's `messages`; those before it may be of an assistant, too."""
    branch: int | None
    """Which of the rollout's `branches` holds the conversation; None where none is kept of it."""
    token: int
    """Place of its first token there; where the branch has but the reply's text, of the first token sampled there."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One attempt of the policy at a task. Grows while its agent runs, final when the agent returned."""

    rollout_id: RolloutId
    group_id: GroupId
    task: Task
    sampling: SamplingParams
    branches: list[Branch] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The conversation of the latest turn, for people; never tokenized again."""
    first_reply: FirstReply | None = None
    """Of that conversation; None where no policy of this package had a turn in it."""
    sampled_texts: dict[int, str] = field(default_factory=dict)
    """Of that conversation, by the places of replies in `messages`: the text as it was sampled, where the message has
    the reasoning apart and no calls were read."""
    reward: Reward | None = None
    turns: int = 0
    truncated: bool = False
    """Some turn ended for length."""
    started_s: float = 0.0
    """Event-loop time at admission."""
    ended_s: float = 0.0
    """When it finished, failed or was cancelled; 0 while it runs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over the rollout: `drifted_turns`, `realigned_turns`, `rewritten_turns`, `generate_s`, `score_s`, ..."""
    attempt: int = 0
    """How often this place in its group was tried before."""
    metadata: dict[str, Json] = field(default_factory=dict)
    """Whatever its author wants to find again; nothing here reads it."""
    reported_metrics: dict[str, float] = field(default_factory=dict)
    """What was reported without a reward; become components of the one that its group's score gives it."""
    reported_info: dict[str, Json] = field(default_factory=dict)
    """Likewise; becomes columns of that reward."""

    @property
    def num_tokens(self) -> int:
        """All tokens of all branches."""
        return sum(branch.num_tokens for branch in self.branches)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens of all branches."""
        return sum(branch.num_completion_tokens for branch in self.branches)


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one task that came back, scored together, in submission order."""

    group_id: GroupId
    task: Task
    rollouts: list[Rollout]
    advantages: list[float | Float32Array] | None = None
    """One per rollout once computed: a number, or one per token of its only branch."""
    index: int = 0
    """Its task's place among those asked for; the parts of a group that was split share it."""
    metadata: dict[str, Json] = field(default_factory=dict)
    """Whatever its author wants to find again; nothing here reads it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What scoring it took: `score_group_s`, and a judge's calls, tokens and cost."""

    @property
    def rewards(self) -> list[float]:
        """Reward values in order. Raises `ValueError` while a rollout is unscored."""
        values = [rollout.reward.value for rollout in self.rollouts if rollout.reward is not None]
        if len(values) != len(self.rollouts):
            raise ValueError(f"group {self.group_id} has rollouts without a reward")
        return values
