"""The environment "mcp": the tools of an MCP server, and tasks and rewards of your own.

    --environment.name mcp --environment.args.command '["mcp-server-time"]'
    --environment.data tasks.jsonl --environment.rewards.right.function my_rewards:right

Needs `pip install "tailrace[mcp]"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from tailrace.environments.adapters.mcp_server import McpServer, McpTools
from tailrace.environments.protocol import Agent, EnvironmentSpec, Policy
from tailrace.environments.results import AgentResult
from tailrace.environments.single_turn import opening_of
from tailrace.environments.tools import ERROR_PREFIX, answer_tool_calls
from tailrace.environments.variables import with_variables
from tailrace.errors import BudgetExceeded, EnvironmentFailed, RequestRefused
from tailrace.records import Task


def mcp(
    *,
    command: list[str] | None = None,
    url: str | None = None,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    headers: dict[str, str] | None = None,
    only: list[str] | None = None,
    shared: bool = False,
    start_timeout_s: float = 30.0,
    call_timeout_s: float = 30.0,
    max_result_characters: int = 20_000,
    prompt: str = "prompt",
    system_prompt: str | None = None,
) -> EnvironmentSpec:
    """An agent with the tools of one server, see `McpServer`; the tasks have a column `prompt`.

    Values of `env` and `headers` may name variables of this process, `Bearer $MCP_KEY`: see `with_variables`. Raises
    `SettingsError` where one is not set, and where the server cannot be started or listed (that once before a run, not
    here).
    """
    server = McpServer(
        command=command or (),
        url=url,
        env=with_variables(env or {}, argument="env"),
        cwd=cwd,
        headers=with_variables(headers or {}, argument="headers"),
        only=only,
        shared=shared,
        start_timeout_s=start_timeout_s,
        call_timeout_s=call_timeout_s,
        max_result_characters=max_result_characters,
    )
    return EnvironmentSpec(
        name="mcp",
        description=f"Tasks of your own, with the tools of {server}.",
        agent=mcp_agent(server, prompt=prompt, system_prompt=system_prompt),
        check=server.check,
        close=server.close,
        required_columns=(prompt,),
    )


def mcp_agent(*servers: McpServer, prompt: str = "prompt", system_prompt: str | None = None) -> Agent:
    """An agent that asks what the column `prompt` says and calls tools of the servers until a reply calls none.

    It returns None: give the spec a `reward` function, or `rewards`. Its metrics are `tool_answers` and `tool_errors`.
    """

    async def agent(task: Task, policy: Policy) -> AgentResult:
        messages = opening_of(task, prompt=prompt, system_prompt=system_prompt)
        answered, refused = 0, 0
        async with AsyncExitStack() as running:
            tools = _together([await running.enter_async_context(server.tools()) for server in servers])
            while True:
                try:
                    reply = await policy.chat(messages, tools=tools.specs)
                except (BudgetExceeded, RequestRefused):
                    if not answered:
                        raise
                    break
                messages.append(reply.message)
                if not (reply.tool_calls or reply.malformed_tool_calls):
                    break
                answers = await answer_tool_calls(reply, tools.functions)
                messages += answers
                answered += len(answers)
                refused += sum(answer["content"].startswith(ERROR_PREFIX) for answer in answers)
        return AgentResult(None, {"tool_answers": float(answered), "tool_errors": float(refused)})

    return agent


def _together(offered: Sequence[McpTools]) -> McpTools:
    """The tools of several servers. Raises `EnvironmentFailed` where two have one of the same name."""
    names = [spec["name"] for tools in offered for spec in tools.specs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvironmentFailed(f"two MCP servers have a tool {twice!r}: name the tools to offer in `only`")
    return McpTools(
        [spec for tools in offered for spec in tools.specs],
        {name: function for tools in offered for name, function in tools.functions.items()},
    )
