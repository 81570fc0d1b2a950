"""The simplest agent: ask once, let the spec's reward function score the answer."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.environments.protocol import Agent, Policy
from tailrace.errors import DataError
from tailrace.records import Message, Task


def single_turn_agent(
    *, prompt: str = "prompt", system_prompt: str | None = None, few_shot: Sequence[tuple[str, str]] = ()
) -> Agent:
    """An agent that sends the task's `prompt` column: one user message, or a list of messages as it is.

    It returns None: give the spec a `reward` function. The system prompt is optional; `few_shot` are questions and
    their answers, turns of their own before all that the column holds. Every row needs the column.
    """

    async def agent(task: Task, policy: Policy) -> None:
        await policy.chat(opening_of(task, prompt=prompt, system_prompt=system_prompt, few_shot=few_shot))

    agent.required_columns = (prompt,)  # type: ignore[attr-defined]
    return agent


def opening_of(
    task: Task, *, prompt: str, system_prompt: str | None, few_shot: Sequence[tuple[str, str]] = ()
) -> list[Message]:
    """A conversation up to the first reply: the system prompt, if any, examples, and the task's column `prompt`.

    Raises `DataError` where that is null.
    """
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for question, answer in few_shot:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = task[prompt]
    if asked is None:
        raise DataError(f"task {task.task_id} has null in its column {prompt!r}, which opens the conversation")
    messages += asked if isinstance(asked, list) else [{"role": "user", "content": str(asked)}]
    return messages
