"""arithmetic: work out an expression. One turn; right or wrong.

user       What is 7 + 12 - 4? Answer with the number.
assistant  15
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from tailrace.environments.answers import extract_number
from tailrace.environments.generated import generated_environment
from tailrace.environments.protocol import EnvironmentSpec
from tailrace.errors import SettingsError
from tailrace.records import Json, Message, Task

Operator = Literal["+", "-", "*"]
OPERATORS: Final[dict[Operator, Callable[[int, int], int]]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def arithmetic(
    *,
    terms: int = 2,
    max_number: int = 20,
    operators: tuple[Operator, ...] = ("+", "-"),
    seed: int = 0,
    size: int = 100_000,
    eval_size: int = 200,
) -> EnvironmentSpec:
    """The environment; expressions have `terms` whole numbers from 0 to `max_number`.

    From three terms on it takes several steps, with parentheses that fix their order. Raises `SettingsError` for too
    few terms, numbers or operators.
    """
    if terms < 2 or max_number < 1 or not operators:
        raise SettingsError(
            f"environment.args: terms = {terms}, max_number = {max_number}, operators = {list(operators)}; "
            "needed are at least 2, 1 and one of + - *"
        )
    ask = "What is {}? Answer with the number."
    return generated_environment(
        "arithmetic",
        partial(draw_expression, terms=terms, max_number=max_number, operators=operators, ask=ask),
        question="expression",
        seed=seed,
        size=size,
        eval_size=eval_size,
        description="Work out an expression; reward: 1 when right.",
        reward=exact_number_reward,
    )


def draw_expression(
    rng: random.Random, *, terms: int, max_number: int, operators: tuple[Operator, ...], ask: str
) -> dict[str, Json]:
    """A row with a random expression. Plain from left to right while only + and - occur, else parenthesized."""
    value = rng.randint(0, max_number)
    expression = str(value)
    for position in range(1, terms):
        symbol = rng.choice(operators)
        number = rng.randint(0, max_number)
        if symbol == "*" and position > 1:
            expression = f"({expression})"
        expression = f"{expression} {symbol} {number}"
        value = OPERATORS[symbol](value, number)
    return {"expression": expression, "prompt": ask.format(expression), "answer": value}


def exact_number_reward(task: Task, messages: list[Message]) -> float:
    """1.0 when the last number of the last reply is the answer, else 0.0."""
    return float(extract_number(messages[-1]["content"]) == float(task["answer"]))
