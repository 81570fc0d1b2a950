"""What a package that publishes an environment of verifiers looks like; nothing here is of Tailrace."""

from __future__ import annotations

from typing import Any, ClassVar

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


SIMULATOR = "gpt-6"


class Simulated(vf.MultiTurnEnv):
    """A user whom a model plays; the subclasses say which one in all the ways that a source can be read for."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        answer = await self.get_model_response(state, messages, model=SIMULATOR)
        return [{"role": "user", "content": answer.message.content}]


class SimulatedByAttribute(vf.MultiTurnEnv):
    user_model = SIMULATOR

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        answer = await self.get_model_response(state, messages, None, self.user_model)
        return [{"role": "user", "content": answer.message.content}]


class SimulatedByVariable(vf.MultiTurnEnv):
    models: ClassVar[dict[str, str]] = {"user": "6"}
    family = ""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        family = self.family or "gpt"
        chosen = f"{family}-" + self.models["user"]
        answer = await self.get_model_response(state, messages, model=chosen)
        return [{"role": "user", "content": answer.message.content}]


class SimulatedInTurns(vf.MultiTurnEnv):
    """By a model that shows in a turn alone."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        answer = await self.asked(state, messages, SIMULATOR)
        return [{"role": "user", "content": answer.message.content}]

    async def asked(self, state: vf.State, messages: vf.Messages, model: str) -> Any:
        return await self.get_model_response(state, messages, model=model)


class SimulatedByItsClient(vf.MultiTurnEnv):
    """With a client of its own, or by the policy itself, in other words."""

    user_client: Any = None

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        chosen = state["model"]
        await self.get_model_response(state, messages, client=self.user_client, model=SIMULATOR)
        await self.get_model_response(state, messages, model=chosen)
        await self.get_model_response(state, messages, model=state["model"])
        answer = await self.get_model_response(state, messages)
        return [{"role": "user", "content": answer.message.content}]


def simulated(kind: type[vf.MultiTurnEnv]) -> vf.Environment:
    return kind(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[near]))


def wishing(**wish: Any) -> vf.Environment:
    made = Wishes(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[near]))
    made.wish = wish
    return made
