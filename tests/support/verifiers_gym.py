"""What a package that publishes an environment of verifiers looks like; nothing here is of Tailrace."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(gym: str = "chain_sum", num_train_examples: int = 16) -> vf.Environment:
    return vf.ReasoningGymEnv(gym=gym, num_train_examples=num_train_examples, num_eval_examples=4)


async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


async def near(completion: list[Any], answer: str, state: Any) -> float:
    state["said"] = completion[-1]["content"]
    return float(completion[-1]["content"] == answer)


ROWS = [{"question": "What is 2 + 3?", "answer": "5"}, {"question": "What is 4 + 4?", "answer": "8"}]


def adding(**changes: Any) -> vf.Environment:
    """Several turns with a tool."""
    rubric = vf.Rubric(funcs=[near], weights=[2.0])
    return vf.ToolEnv(tools=[add], **{"dataset": Dataset.from_list(ROWS), "rubric": rubric, "max_turns": 4, **changes})


class Wishes(vf.SingleTurnEnv):
    """Asks for more than another turn of the policy."""

    wish: dict[str, Any]

    async def get_model_response(self, state: vf.State, prompt: vf.Messages, **_: Any) -> vf.Response:
        return await super().get_model_response(state, prompt, **self.wish)


def wishing(**wish: Any) -> vf.Environment:
    made = Wishes(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[near]))
    made.wish = wish
    return made
