"""A policy that says what a test wrote down: drives agents and environments without a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tailrace.environments import AgentResult, EnvironmentSpec, Message, Observation, Reply, Task, ToolCall, ToolSpec
from tailrace.environments.callables import settled
from tailrace.environments.results import as_agent_result
from tailrace.errors import BudgetExceeded
from tailrace.records import Completion, FinishReason

_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)
NOTHING_SAMPLED = Completion(_NO_IDS, _NO_LOGPROBS, _NO_IDS, FinishReason.STOP)


@dataclass(frozen=True)
class Said:
    """One scripted reply."""

    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    malformed_tool_calls: int = 0


def calls(name: str, arguments: dict[str, object] | str, call_id: str = "call-1") -> Said:
    """A reply that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return Said(tool_calls=[ToolCall(id=call_id, type="function", function=function)])  # type: ignore[typeddict-item]


@dataclass
class ScriptedPolicy:
    """Implements `Policy`: gives the replies in order, then has no turn left. Remembers what it was shown."""

    replies: Sequence[str | Said]
    conversations: list[list[Message]] = field(default_factory=list)
    """The conversation at every turn, as it was then."""
    tools: list[list[ToolSpec] | None] = field(default_factory=list)
    demonstrations: list[list[Message]] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return self.conversations[-1] if self.conversations else []

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        turn = len(self.conversations)
        if turn >= len(self.replies):
            raise BudgetExceeded(f"the script has {len(self.replies)} replies, the agent asked for more")
        self.conversations.append(copy.deepcopy(messages))
        self.tools.append(tools)
        scripted = self.replies[turn]
        said = Said(scripted) if isinstance(scripted, str) else scripted
        message = Message(role="assistant", content=said.content)
        if said.tool_calls:
            message["tool_calls"] = list(said.tool_calls)
        return Reply(
            message=message,
            finish_reason=FinishReason.STOP,
            completion=NOTHING_SAMPLED,
            tool_calls=list(said.tool_calls),
            malformed_tool_calls=said.malformed_tool_calls,
        )

    def demonstrate(self, messages: list[Message], *, tools: list[ToolSpec] | None = None, weight: float = 1.0) -> None:
        self.demonstrations.append(messages)

    def set_column(self, reply: Reply, name: str, values: object) -> None:
        """There are no tokens to set it for."""


async def play(spec: EnvironmentSpec, task: Task, replies: Sequence[str | Said]) -> AgentResult:
    """Play one rollout of any environment with scripted replies and return its result."""
    policy = ScriptedPolicy(replies)
    if spec.agent is None:
        result, messages = await _play_environment(spec, task, policy)
    else:
        result = as_agent_result(await spec.agent(task, policy))
        last = replies[len(policy.conversations) - 1]
        messages = [*policy.conversations[-1], Message(role="assistant", content=str(getattr(last, "content", last)))]
    return result if spec.reward is None else as_agent_result(await settled(spec.reward(task, messages)))


async def _play_environment(
    spec: EnvironmentSpec, task: Task, policy: ScriptedPolicy
) -> tuple[AgentResult, list[Message]]:
    assert spec.environment is not None
    environment = spec.environment()
    observation: Observation = await settled(environment.reset(task))
    total, metrics, messages = observation.reward or 0.0, dict(observation.metrics), list(observation.messages)
    while not observation.done:
        reply = await policy.chat(messages, tools=list(spec.tools) or None)
        messages.append(reply.message)
        observation = await settled(environment.step(reply.message))
        messages += observation.messages
        total += observation.reward or 0.0
        metrics |= observation.metrics
    return AgentResult(total, metrics), messages
