"""Agents as their frameworks' own examples write them: two tools, a question, an answer. None knows of Tailrace.

Each is told where the model is by what its framework has for that, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tailrace.environments import Endpoint

SYSTEM = "You are a calculator. Use the tools."
QUESTION = "What is (3 + 4) * 5?"
ADD = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
MULTIPLY = '<tool_call>{"name": "multiply", "arguments": {"b": 5, "a": 7}}</tool_call>'
FINAL = "It is 35."
REPLIES = (ADD, MULTIPLY, FINAL)
"""What a policy says that solves it."""

Solve = Callable[[Endpoint, str], Awaitable[str]]
"""Answers a question with the model of an endpoint."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


FUNCTIONS: dict[str, Callable[[int, int], int]] = {"add": add, "multiply": multiply}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


async def openai_agents(endpoint: Endpoint, question: str) -> str:
    """The Agents SDK, by Responses."""
    return await _agents_sdk(endpoint, question, streams=False)


async def openai_agents_streamed(endpoint: Endpoint, question: str) -> str:
    """The same, with every event of a stream."""
    return await _agents_sdk(endpoint, question, streams=True)


async def _agents_sdk(endpoint: Endpoint, question: str, *, streams: bool) -> str:
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        agent = Agent(
            name="Calculator",
            instructions=SYSTEM,
            tools=[function_tool(add), function_tool(multiply)],
            model=OpenAIResponsesModel(model="policy", openai_client=client),
        )
        config = RunConfig(tracing_disabled=True)
        if not streams:
            return str((await Runner.run(agent, question, run_config=config)).final_output)
        run = Runner.run_streamed(agent, question, run_config=config)
        async for _ in run.stream_events():
            pass
        return str(run.final_output)


async def handed_over(endpoint: Endpoint, question: str, *, speaks: str, nests: bool) -> str:
    """The Agents SDK, where an agent hands over to the one that has the tool.

    That one is told the conversation as a summary where it `nests`, and otherwise what is left of it without calls.
    """
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
        function_tool,
        handoff,
    )
    from agents.extensions.handoff_filters import remove_all_tools
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        kind = OpenAIResponsesModel if speaks == "responses" else OpenAIChatCompletionsModel
        model = kind("policy", client)
        adder = Agent(name="adder", instructions=SYSTEM, tools=[function_tool(add)], model=model)
        over = handoff(adder, input_filter=None if nests else remove_all_tools)
        first = Agent(name="first", instructions="Hand over to who can.", handoffs=[over], model=model)
        config = RunConfig(tracing_disabled=True, nest_handoff_history=nests)
        return str((await Runner.run(first, question, run_config=config)).final_output)


async def langgraph(endpoint: Endpoint, question: str) -> str:
    """LangGraph's agent, by chat completions."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", base_url=endpoint.openai_url, api_key=endpoint.key)  # type: ignore[arg-type]
    agent = create_react_agent(model, [tool(add), tool(multiply)], prompt=SYSTEM)
    state = await agent.ainvoke({"messages": [("user", question)]})
    return str(state["messages"][-1].content)


async def smolagents(endpoint: Endpoint, question: str) -> str:
    """smolagents' agent that calls tools, by chat completions."""
    return await asyncio.to_thread(_smolagents, endpoint.openai_url, endpoint.key, question)


async def smolagents_in_few_words(endpoint: Endpoint, question: str) -> str:
    """The same with a system prompt of its user's, since its own is longer than a small model's context.

    Whoever calls no tool in the first step is asked for an answer at once.
    """
    return await asyncio.to_thread(_smolagents, endpoint.openai_url, endpoint.key, question, prompt=SYSTEM, steps=1)


def _smolagents(url: str, key: str, question: str, *, prompt: str | None = None, steps: int = 4) -> str:
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel("policy", api_base=url, api_key=key, tool_choice="auto")
    agent = ToolCallingAgent([tool(add), tool(multiply)], model, max_steps=steps, verbosity_level=LogLevel.OFF)
    if prompt is not None:
        agent.prompt_templates["system_prompt"] = prompt
    return str(agent.run(question))


async def openai_chat(endpoint: Endpoint, question: str) -> str:
    """OpenAI's client, by chat completions."""
    from openai import AsyncOpenAI

    tools: Any = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}} for name in FUNCTIONS
    ]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message: Any = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return str(message.content)
            for call in message.tool_calls:
                result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def openai_responses(endpoint: Endpoint, question: str) -> str:
    """OpenAI's client, by Responses that follow each other."""
    from openai import AsyncOpenAI

    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in FUNCTIONS]
    items: Any = question
    previous: str | None = None
    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        while True:
            response: Any = await client.responses.create(
                model="policy", instructions=SYSTEM, input=items, tools=tools, previous_response_id=previous
            )
            previous = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return str(response.output_text)
            items = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": str(FUNCTIONS[call.name](**json.loads(call.arguments))),
                }
                for call in calls
            ]


async def anthropic_messages(endpoint: Endpoint, question: str) -> str:
    """Anthropic's client and its runner of tools."""
    from anthropic import AsyncAnthropic, beta_async_tool

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(FUNCTIONS["add"](a, b))

    @beta_async_tool
    async def multiply(a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(FUNCTIONS["multiply"](a, b))

    async with AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.key) as client:
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=200,
            system=SYSTEM,
            tools=[add, multiply],
            messages=[{"role": "user", "content": question}],
        )
        last: Any = await runner.until_done()
    return "".join(block.text for block in last.content if block.type == "text")


AGENTS: dict[str, Solve] = {
    "openai_agents": openai_agents,
    "openai_agents_streamed": openai_agents_streamed,
    "langgraph": langgraph,
    "smolagents": smolagents,
    "smolagents_in_few_words": smolagents_in_few_words,
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
    "anthropic_messages": anthropic_messages,
}
PACKAGES = {
    "openai_agents": "agents",
    "openai_agents_streamed": "agents",
    "langgraph": "langgraph",
    "smolagents": "smolagents",
    "smolagents_in_few_words": "smolagents",
}
"""What an agent needs beyond OpenAI's and Anthropic's own packages."""
