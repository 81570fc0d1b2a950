"""The simplest agent: ask once, let the spec's reward function score the answer."""

from __future__ import annotations

from tailrace.environments.protocol import Agent, Policy
from tailrace.records import Message, Task


def single_turn_agent(*, prompt: str = "prompt", system_prompt: str | None = None) -> Agent:
    """An agent that sends the task's `prompt` column: one user message, or a list of messages as it is.

    It returns None: give the spec a `reward` function. The system prompt is optional. Every row needs the column.
    """

    async def agent(task: Task, policy: Policy) -> None:
        await policy.chat(opening_of(task, prompt=prompt, system_prompt=system_prompt))

    agent.required_columns = (prompt,)  # type: ignore[attr-defined]
    return agent


def opening_of(task: Task, *, prompt: str, system_prompt: str | None) -> list[Message]:
    """A conversation up to the first reply: the system prompt, if any, and the task's column `prompt`."""
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asked = task[prompt]
    messages += asked if isinstance(asked, list) else [{"role": "user", "content": str(asked)}]
    return messages
