"""The simplest agent: ask once, let the spec's reward function score the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number

import numpy as np

from tailrace.environments.protocol import Agent, Policy
from tailrace.errors import DataError
from tailrace.records import Message, Task


def single_turn_agent(
    *, prompt: str = "prompt", system_prompt: str | None = None, few_shot: Sequence[tuple[str, str]] = ()
) -> Agent:
    """An agent that sends the task's `prompt` column: text as one user message, or messages as they are.

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

    Raises `DataError` where that holds nothing to ask.
    """
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for question, answer in few_shot:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, *asked_in(task, prompt)]


def asked_in(task: Task, column: str) -> list[Message]:
    """What a task's column asks: text or a number as one user message; messages, in a list or an array, as they are.

    Raises `DataError` for anything else.
    """
    given = task[column]
    asked = given.tolist() if isinstance(given, np.ndarray) else given
    if isinstance(asked, str | Number):
        return [{"role": "user", "content": str(asked)}]
    if isinstance(asked, Sequence) and all(isinstance(message, Mapping) for message in asked):
        return [*asked]
    found = "null" if given is None else f"a value of type {type(given).__name__}"
    raise DataError(
        f"task {task.task_id} has {found} in its column {column!r}, which opens the conversation: it takes text, or a "
        "list of messages"
    )
