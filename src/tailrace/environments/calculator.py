"""calculator: sums too big for the head, and a tool that can do them. Several turns, right or wrong.

    user       What is (8231 - 914) * 77?
    assistant  <tool call> calculator(expression="(8231 - 914) * 77")
    tool       563409
    assistant  563409

What a small agent with a tool looks like: `calculator_agent` is all there is to it.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from tailrace.environments.answers import extract_number
from tailrace.environments.arithmetic import draw_expression
from tailrace.environments.generated import generated_environment
from tailrace.environments.protocol import EnvironmentSpec, Policy
from tailrace.environments.results import AgentResult
from tailrace.environments.tools import ERROR_PREFIX, answer_tool_calls
from tailrace.errors import SettingsError, ToolError
from tailrace.records import Json, Message, Task, ToolSpec

CALCULATOR: Final = ToolSpec(
    name="calculator",
    description="Works out an arithmetic expression of numbers, + - * / // % ** and parentheses.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12 + 30) * 2"}},
        "required": ["expression"],
    },
)


def calculator(
    *,
    terms: int = 3,
    max_number: int = 9_999,
    max_turns: int = 4,
    seed: int = 0,
    size: int = 100_000,
    eval_size: int = 200,
) -> EnvironmentSpec:
    """The environment; expressions have `terms` numbers up to `max_number`, a rollout at most `max_turns` turns.

    Raises `SettingsError` for too few terms, numbers or turns.
    """
    if terms < 2 or max_number < 1 or max_turns < 2:
        raise SettingsError(
            f"environment.args: terms = {terms}, max_number = {max_number}, max_turns = {max_turns}; "
            "needed are at least 2, 1 and 2 (one turn calls the tool, the next answers)"
        )
    ask = "What is {}? Use the calculator, then answer with the number."
    return generated_environment(
        "calculator",
        partial(draw_expression, terms=terms, max_number=max_number, operators=("+", "-", "*"), ask=ask),
        question="expression",
        seed=seed,
        size=size,
        eval_size=eval_size,
        description="Work out a big sum with a calculator tool; reward: 1 when right.",
        agent=partial(calculator_agent, max_turns=max_turns),
    )


async def calculator_agent(task: Task, policy: Policy, *, max_turns: int) -> AgentResult:
    """Let the policy call the tool until it answers without a call, or its turns are used up."""
    messages: list[Message] = [{"role": "user", "content": task["prompt"]}]
    answers: list[Message] = []
    for _ in range(max_turns):
        reply = await policy.chat(messages, tools=[CALCULATOR])
        messages.append(reply.message)
        if not (reply.tool_calls or reply.malformed_tool_calls):
            break
        new = await answer_tool_calls(reply, {"calculator": evaluate})
        messages += new
        answers += new
    answered = messages[-1]["role"] == "assistant"
    right = answered and extract_number(messages[-1]["content"]) == float(task["answer"])
    errors = sum(answer["content"].startswith(ERROR_PREFIX) for answer in answers)
    return AgentResult(float(right), metrics={"tool_calls": len(answers), "tool_errors": errors})


_MAX_CHARACTERS = 200
_MAX_EXPONENT = 64
_MAX_VALUE = 1e30
_ALLOWED = re.compile(r"[\d.+\-*/%() ]+")  # no letter: nothing but numbers and operators ever reaches the parser

_Number = int | float
_BINARY: Final[dict[type[ast.operator], Callable[[_Number, _Number], _Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def evaluate(expression: Json) -> str:
    """The value of an arithmetic expression, without running any code and in bounded time; raises `ToolError`.

    >>> evaluate("(12 + 30) * 2"), evaluate("1 / 8")
    ('84', '0.125')
    """
    text = str(expression).strip()
    if len(text) > _MAX_CHARACTERS or not _ALLOWED.fullmatch(text):
        raise ToolError(f"expected at most {_MAX_CHARACTERS} characters of numbers, + - * / // % ** and parentheses")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ToolError(f"{text!r} is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (OverflowError, RecursionError) as error:
        raise ToolError("the result is too large") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> _Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_EXPONENT:
            raise ToolError(f"exponents go up to {_MAX_EXPONENT}")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ToolError("only numbers, + - * / // % ** and parentheses are known")


def _bounded(value: _Number) -> _Number:
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > _MAX_VALUE:
        raise ToolError("the result is too large or not a real number")
    return value
