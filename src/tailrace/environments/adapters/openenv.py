"""The environment "openenv": environments of OpenEnv, reached under a URL or started from their package.

    --environment.name openenv --environment.args.url http://127.0.0.1:8000
    --environment.name openenv --environment.args.package echo_env

A turn is a step: the policy's reply becomes an action, what the environment observes becomes the next message, and the
rollout's reward is the sum of its steps'. Needs `pip install "tailrace[openenv]"` (not OpenEnv itself).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Number
from typing import Literal

from tailrace.environments.adapters.openenv_server import InvalidAction, OpenEnvServer, Transport
from tailrace.environments.adapters.servers import look_once
from tailrace.environments.protocol import Agent, EnvironmentSpec, Policy, TaskRows
from tailrace.environments.results import AgentResult, finite_number
from tailrace.environments.rows import EmptyRows
from tailrace.environments.single_turn import asked_in
from tailrace.environments.tools import ERROR_PREFIX
from tailrace.environments.variables import with_variables
from tailrace.errors import BudgetExceeded, RequestRefused, SettingsError
from tailrace.records import Json, Message, Reply, Task, ToolSpec

ActionForm = Literal["auto", "text", "json", "tool"]
_BESIDE = ("done", "metadata", "reward")
_TASKS, _EVAL_TASKS = 100_000, 200
_TOOL = "step"


def openenv(
    *,
    url: str | None = None,
    package: str | None = None,
    python: str | None = None,
    cwd: str | None = None,
    headers: dict[str, str] | None = None,
    transport: Transport = "auto",
    start_timeout_s: float = 60.0,
    step_timeout_s: float = 60.0,
    action: ActionForm = "auto",
    action_field: str | None = None,
    observation_field: str | None = None,
    system_prompt: str | None = None,
) -> EnvironmentSpec:
    """An environment of the server that the first arguments name, see `OpenEnvServer`, and `openenv_environment`.

    Values of `headers` may name variables of this process: see `with_variables`.
    """
    given = {} if python is None else {"python": python}
    server = OpenEnvServer(
        url=url,
        package=package,
        cwd=cwd,
        headers=with_variables(headers or {}, argument="headers"),
        transport=transport,
        start_timeout_s=start_timeout_s,
        step_timeout_s=step_timeout_s,
        **given,
    )
    return openenv_environment(
        server,
        name=package or "openenv",
        action=action,
        action_field=action_field,
        observation_field=observation_field,
        system_prompt=system_prompt,
    )


def openenv_environment(
    server: OpenEnvServer,
    *,
    name: str = "openenv",
    train_tasks: TaskRows | None = None,
    eval_tasks: TaskRows | None = None,
    action: ActionForm | Callable[[Reply], Mapping[str, Json]] = "auto",
    action_field: str | None = None,
    observation_field: str | None = None,
    observation: Callable[[Mapping[str, Json]], str] | None = None,
    system_prompt: str | None = None,
) -> EnvironmentSpec:
    """An environment of OpenEnv as the policy meets it.

    `action` says what a reply is: the text of the one field that the action has (or of `action_field`), a JSON object,
    or a call of the tool `step`, whose parameters are the action's fields; "auto" takes text where the action has one
    field of text, else the tool. Or a function of the reply, which raises `ValueError` for one that is no action. The
    policy reads the observation's `observation_field`, or its only text, or all of it as JSON; or what `observation`
    makes of it. Without tasks each is another `seed`; columns of a row go to `reset`, all but `prompt`, which the
    conversation opens with.
    """
    make = partial(_Form, action, action_field, observation_field, observation)
    return EnvironmentSpec(
        name=name,
        description=f"An environment of OpenEnv: {server}.",
        agent=_agent(server, make(server), system_prompt),
        check=partial(_check, server, make),
        close=server.close,
        train_tasks=EmptyRows(_TASKS) if train_tasks is None else train_tasks,
        eval_tasks=(EmptyRows(_EVAL_TASKS) if train_tasks is None else ()) if eval_tasks is None else eval_tasks,
    )


def _agent(server: OpenEnvServer, form: _Form, system_prompt: str | None) -> Agent:
    async def agent(task: Task, policy: Policy) -> AgentResult:
        actions = await form.actions()
        reset = {name: value for name, value in task.row.items() if name != "prompt"}
        seed = zlib.crc32(f"{task.task_id}/{task.seed}".encode()) & 0x7FFFFFFF
        async with server.session({"seed": seed, **reset}) as (session, first):
            messages = _opening(task, form.text(first), system_prompt)
            total, steps, invalid = _reward(first), 0, 0
            is_done = bool(first.get("done"))
            while not is_done:
                try:
                    reply = await policy.chat(messages, tools=actions.tools)
                except (BudgetExceeded, RequestRefused):
                    if not (steps or invalid):
                        raise
                    break
                messages.append(reply.message)
                try:
                    answer = await session.step(actions.of(reply))
                except (InvalidAction, ValueError) as error:
                    invalid += 1
                    messages.append(actions.answer(reply, f"{ERROR_PREFIX}{error}"))
                    continue
                steps += 1
                total = _plus(total, _reward(answer))
                messages.append(actions.answer(reply, form.text(answer)))
                is_done = bool(answer.get("done"))
        if total is None and invalid:
            total = 0.0
        return AgentResult(total, {"steps": float(steps), "invalid_actions": float(invalid)})

    return agent


@dataclass(frozen=True)
class _Actions:
    """How replies become actions."""

    of: Callable[[Reply], Mapping[str, Json]]
    """Raises `ValueError` for a reply that is none."""
    tools: list[ToolSpec] | None = None

    def answer(self, reply: Reply, content: str) -> Message:
        """What follows a reply: the tool's answer, or the user's message."""
        if self.tools is None or not reply.tool_calls:
            return Message(role="user", content=content)
        message = Message(role="tool", name=_TOOL, content=content)
        call = reply.tool_calls[0]
        return {**message, "tool_call_id": call["id"]} if "id" in call else message


class _Form:
    """What the settings say of actions and observations, made out with the server's schema when it is first known."""

    def __init__(
        self,
        action: ActionForm | Callable[[Reply], Mapping[str, Json]],
        action_field: str | None,
        observation_field: str | None,
        observation: Callable[[Mapping[str, Json]], str] | None,
        server: OpenEnvServer,
    ) -> None:
        if action_field is not None and action not in ("auto", "text"):
            raise SettingsError("environment.args.action_field is for actions that are text: leave it or `action` out")
        if observation_field is not None and observation is not None:
            raise SettingsError("give one of `observation_field` and `observation`")
        self._server, self._action, self._action_field = server, action, action_field
        self._observation_field, self._observation = observation_field, observation
        self._actions: _Actions | None = None

    async def actions(self) -> _Actions:
        """Raises `EnvironmentFailed` where the server cannot be asked, or its actions are of another form."""
        if self._actions is None:
            if not isinstance(self._action, str):
                self._actions = _Actions(self._action)
            elif self._action_field is not None:
                self._actions = _as_text(self._action_field)
            elif self._action == "json":
                self._actions = _Actions(_from_json)
            else:
                self._actions = self._from_schema(await self._server.schema(), self._action)
        return self._actions

    def _from_schema(self, schemas: Mapping[str, Json], form: str) -> _Actions:
        schema = schemas.get("action")
        if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
            raise self._server.failed("has no schema of its actions: say environment.args.action = 'json'")
        fields = {name: one for name, one in schema["properties"].items() if name != "metadata"}
        if "tool_name" in fields and "arguments" in fields:
            raise self._server.failed("has tools for actions: reach it as an MCP server, under its /mcp")
        texts = [name for name, one in fields.items() if one.get("type") == "string" and "enum" not in one]
        if form == "text" or (form == "auto" and len(fields) == len(texts) == 1):
            if len(texts) != 1:
                raise self._server.failed(
                    f"has actions of the fields {', '.join(fields)}: say which is text, environment.args.action_field"
                )
            return _as_text(texts[0])
        described = str(schema.get("description") or "Act in the environment.")
        parameters = {**{k: v for k, v in schema.items() if k not in ("title", "description")}, "properties": fields}
        tool = ToolSpec(name=_TOOL, description=described, parameters=parameters)
        return _Actions(_from_call, [tool])

    def text(self, answer: Mapping[str, Json]) -> str:
        """What the policy reads of an observation."""
        seen = answer.get("observation")
        if not isinstance(seen, dict):
            raise self._server.failed(f"observed {seen!r:.200}, which is no object")
        if self._observation is not None:
            return self._observation(seen)
        if self._observation_field is not None:
            if self._observation_field not in seen:
                raise self._server.failed(f"observed no {self._observation_field!r}, but: {', '.join(seen)}")
            value = seen[self._observation_field]
            return value if isinstance(value, str) else json.dumps(value)
        shown = {name: value for name, value in seen.items() if name not in _BESIDE}
        only = next(iter(shown.values())) if len(shown) == 1 else None
        return only if isinstance(only, str) else json.dumps(shown)


def _as_text(field: str) -> _Actions:
    return _Actions(lambda reply: {field: reply.content})


def _from_json(reply: Reply) -> Mapping[str, Json]:
    text = reply.content
    start, end = text.find("{"), text.rfind("}")
    found = json.loads(text[start : end + 1]) if start >= 0 else None
    if not isinstance(found, dict):
        raise ValueError("answer with the action as a JSON object")
    return found


def _from_call(reply: Reply) -> Mapping[str, Json]:
    if len(reply.tool_calls) != 1 or reply.tool_calls[0]["function"]["name"] != _TOOL:
        raise ValueError(f"call the tool {_TOOL!r} once")
    arguments = reply.tool_calls[0]["function"]["arguments"]
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict):
        raise ValueError("the arguments must be a JSON object")
    return found


def _opening(task: Task, observed: str, system_prompt: str | None) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompt = task.row.get("prompt")
    if prompt is None or isinstance(prompt, str | Number):
        return [*messages, {"role": "user", "content": f"{prompt}\n\n{observed}" if prompt else observed}]
    return [*messages, *asked_in(task, "prompt"), {"role": "user", "content": observed}]


def _reward(answer: Mapping[str, Json]) -> float | None:
    reward = answer.get("reward")
    return None if reward is None else finite_number(reward, "the reward of a step")


def _plus(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more


def _check(server: OpenEnvServer, make: Callable[[OpenEnvServer], _Form]) -> None:
    """Ask the server for its schema, and reset it once. Raises `SettingsError` where that fails."""
    server = replace(server)  # with a process and connections of its own: they belong to one event loop
    form = make(server)

    async def look() -> None:
        try:
            await form.actions()
            async with server.session({"seed": 0}) as (_, first):
                form.text(first)
        finally:
            await server.close()

    look_once(look())
