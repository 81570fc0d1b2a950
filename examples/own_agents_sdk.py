"""An agent of OpenAI's Agents SDK with two tools, trained as it is.

    pip install 'tailrace[gateway]' openai-agents
    tailrace train quickstart --environment.name examples.own_agents_sdk:seats

Run it from the folder above this one. `seat_finder` is an agent as you have it already, and knows nothing of Tailrace:
`agent` gives it the address and the key of one rollout, and says what the answer was worth.
"""

from __future__ import annotations

from difflib import SequenceMatcher

from agents import Agent, AgentsException, Model, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from tailrace.environments import EnvironmentSpec, Policy, Task

TABLE = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Iris", "Paul", "Nina", "Hugo", "Vera", "Sam", "Ruth", "Karl"]
"""Round it: the last one sits beside the first."""
CLIENT = AsyncOpenAI(base_url="http://of-each-rollout", api_key="of each rollout")
"""Made once: loading its TLS settings would hold the event loop for tens of milliseconds in each rollout."""


def left_of(name: str) -> str:
    """Who sits on the left of somebody."""
    return TABLE[TABLE.index(name) - 1]


def right_of(name: str) -> str:
    """Who sits on the right of somebody."""
    return TABLE[TABLE.index(name) - len(TABLE) + 1]


def seat_finder(model: Model) -> Agent:
    """The agent."""
    return Agent(
        name="Seat finder",
        instructions="Look seats up with your tools. Answer with names alone, one per line.",
        tools=[function_tool(left_of), function_tool(right_of)],
        model=model,
    )


async def agent(task: Task, policy: Policy) -> float:
    """One rollout: a run of the agent, rewarded letter by letter.

    The SDK raises for answers that are cut and for tools that are not there: worth nothing, and no reason to try again.
    """
    name = task["name"]
    question = f"Who sits on the left of {name}, and who on the right?"
    async with policy.endpoint() as here:
        client = CLIENT.with_options(base_url=here.openai_url, api_key=here.key)
        finder = seat_finder(OpenAIResponsesModel("policy", client))
        try:
            run = await Runner.run(finder, question, max_turns=4, run_config=RunConfig(tracing_disabled=True))
        except AgentsException:
            return 0.0
    return SequenceMatcher(None, str(run.final_output).strip(), f"{left_of(name)}\n{right_of(name)}").ratio()


seats = EnvironmentSpec(
    name="seats",
    agent=agent,
    train_tasks=[{"name": name} for name in TABLE for _ in range(40)],
    eval_tasks=[{"name": name} for name in TABLE],
)
