"""Environments of verifiers 0.3 (its first API: `load_environment`, rubrics, `run_rollout`), as they are.

    --environment.name verifiers --environment.args.id my-environment

The environment plays and scores the rollout in this process; its client is ours and asks the policy, so that what is
trained on is what was sampled, and what `response.message.tokens` says. Needs `pip install "tailrace[verifiers]"`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from tailrace.environments.adapters.verifiers_models import other_models
from tailrace.environments.protocol import Agent, EnvironmentSpec, Policy, TaskRows
from tailrace.environments.results import AgentResult
from tailrace.errors import BudgetExceeded, EnvironmentFailed, RequestRefused, SettingsError
from tailrace.extras import import_extra
from tailrace.records import FinishReason, Json, Message, Reply, Task, ToolCall, ToolSpec

MODEL = "policy"
"""What an environment calls the model that is trained."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_HARMLESS: Mapping[str, Json] = {"n": 1, "top_p": 1.0, "logprobs": True, "seed": None}
"""Sampling arguments that change nothing, with the values (where not None) for which that is so."""

_import = partial(import_extra, extra="verifiers", what="an environment of verifiers")


def verifiers(*, id: str, state_columns: list[str] | None = None, **args: Json) -> EnvironmentSpec:
    """The environment that an installed package offers under `id`; all other arguments go to its `load_environment`.

    Raises `SettingsError` where it cannot be loaded, or needs what Tailrace has not.
    """
    _leave_signals_alone()
    load = _import("verifiers").load_environment
    try:
        environment = load(id, **args)
    except Exception as error:
        cause = error.__cause__ or error
        raise SettingsError(f"environment.args.id is {id!r}: verifiers could not load it: {cause}") from error
    return verifiers_environment(environment, name=id.rpartition("/")[2], state_columns=state_columns or ())


def verifiers_environment(
    environment: Any, *, name: str | None = None, state_columns: Sequence[str] = ()
) -> EnvironmentSpec:
    """A `verifiers.Environment`, or what makes one when it is called, with its own data sets and rubric.

    A module that is named in settings gives what makes it: where it is imported in a thread, verifiers' constructors
    fail, since they set signal handlers, unless they are called here. The rubric's metrics become components of the
    reward; `state_columns` are saved beside the rollout, with `stop_condition`. Raises `SettingsError` for what it
    cannot do: see `docs/environments.md`.
    """
    _leave_signals_alone()
    base = _import("verifiers").Environment
    if callable(environment) and not isinstance(environment, base):
        environment = environment()
    if not isinstance(environment, base):
        raise SettingsError(
            f"this is a {type(environment).__name__}, no verifiers.Environment (the API of verifiers 0.3)"
        )
    name = name or environment.env_id or type(environment).__name__
    train, held_out = environment.get_dataset(), _eval_rows(environment)
    _refuse_what_we_cannot(environment, name, [rows[0] for rows in (train, held_out) if len(rows)])
    return EnvironmentSpec(
        name=name,
        description=(type(environment).__doc__ or "").strip().partition("\n")[0],
        agent=_agent(environment, tuple(state_columns)),
        train_tasks=train,
        eval_tasks=held_out,
        required_columns=("prompt", "example_id"),
    )


def _leave_signals_alone() -> None:
    """Load verifiers, and let its environments' constructors set no handlers of this process's signals."""
    _import("verifiers.types")
    module = _import("verifiers.legacy.envs.environment")
    module.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})


def _agent(environment: Any, state_columns: Sequence[str]) -> Agent:
    async def agent(task: Task, policy: Policy) -> AgentResult:
        client = _client_class()(policy)
        output = await environment.run_rollout(
            *(dict(task.row), client, MODEL, _own_sampling(environment)),
            state_columns=[*state_columns, "stop_condition"],
        )
        if client.replies == 0 and client.exhausted is not None:
            raise client.exhausted
        if output.get("error") is not None:
            raise EnvironmentFailed(f"the environment ended with an error: {_described(output['error'])}")
        metrics = {key: float(value) for key, value in (output.get("metrics") or {}).items()}
        kept = {key: output.get(key) for key in (*state_columns, "stop_condition")}
        return AgentResult(output["reward"], metrics, kept)

    return agent


@cache
def _client_class() -> Any:
    """Our client, made when verifiers is first used."""
    base: Any = _import("verifiers.clients").Client

    class PolicyClient(base):  # type: ignore[misc]
        """Asks the policy of one rollout."""

        def __init__(self, policy: Policy) -> None:
            super().__init__(None)
            self._policy = policy
            self.replies = 0
            self.exhausted: BudgetExceeded | RequestRefused | None = None

        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            """One turn. What the run decides (limits, a cancelled rollout, a lost engine) passes unchanged."""
            if model != MODEL:
                raise _asks_another("the environment", model)
            messages, _extra = await self.to_native_prompt(prompt)
            try:
                reply = await self.get_native_response(
                    messages, model, sampling_args or {}, await self.to_native_tools(tools)
                )
            except (BudgetExceeded, RequestRefused) as error:  # the episode ends here, and is scored as it is
                self.exhausted = error
                raise _import("verifiers.errors").OverlongPromptError(str(error)) from error
            self.replies += 1
            return await self.from_native_response(reply)

        async def to_native_tool(self, tool: Any) -> ToolSpec:
            return ToolSpec(name=tool.name, description=tool.description, parameters=dict(tool.parameters))

        async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
            return [as_message(message) for message in messages], {}

        async def get_native_response(
            self, prompt: list[Message], model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Reply:
            return await self._policy.chat(prompt, tools=tools, **chat_arguments(sampling_args))

        async def raise_from_native_response(self, response: Reply) -> None:
            """Whatever the policy says is what it said."""

        async def from_native_response(self, response: Reply) -> Any:
            return as_response(response)

        def setup_client(self, config: Any) -> None:
            """There is none below it."""

        async def close(self) -> None:
            """There is nothing to close."""

    return PolicyClient


def chat_arguments(sampling_args: Mapping[str, Json]) -> dict[str, Any]:
    """The keywords of `Policy.chat` for an environment's own sampling arguments.

    Raises `SettingsError` for one that the policy does not have.

    >>> chat_arguments({"max_tokens": 8, "temperature": 0.5, "n": 1, "stop": "."})
    {'max_tokens': 8, 'temperature': 0.5, 'stop': ['.']}
    """
    chosen: dict[str, Any] = {}
    for name, value in sampling_args.items():
        if value is None or (name in _HARMLESS and _HARMLESS[name] in (None, value)):
            continue
        if name in _LIMITS:
            chosen["max_tokens"] = int(value)
        elif name == "temperature":
            chosen["temperature"] = float(value)
        elif name == "stop":
            chosen["stop"] = [value] if isinstance(value, str) else list(value)
        else:
            raise SettingsError(
                f"the environment samples with {name} = {value!r}; of its own it may set max_tokens, temperature and "
                "stop, the rest is the run's (rollouts.*)"
            )
    return chosen


def as_message(message: Any) -> Message:
    """A message of verifiers as one of ours. Raises `EnvironmentFailed` for content that is no text."""
    content = message.content
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if odd := [part["type"] for part in parts if part["type"] != "text"]:
            raise EnvironmentFailed(f"a message holds content of type {odd[0]!r}; the policy reads text alone")
        content = "".join(part["text"] for part in parts)
    role: Any = "user" if message.role == "text" else message.role
    ours = Message(role=role, content=content or "")
    if calls := message.get("tool_calls"):
        ours["tool_calls"] = [
            ToolCall(id=one.id, type="function", function={"name": one.name, "arguments": one.arguments})
            for one in calls
        ]
    if reasoning := message.get("reasoning_content"):
        ours["reasoning_content"] = reasoning
    if role == "tool":
        ours["tool_call_id"] = message.tool_call_id
    return ours


def as_response(reply: Reply) -> Any:
    """A reply as verifiers' response, with the very tokens that were sampled."""
    types = _import("verifiers.types")
    prompt, completion = reply.prompt_token_ids, reply.completion
    calls = [
        types.ToolCall(
            id=call.get("id") or f"call_{number}",
            name=call["function"]["name"],
            arguments=_as_json(call["function"]["arguments"]),
        )
        for number, call in enumerate(reply.tool_calls)
    ]
    is_cut = reply.finish_reason is FinishReason.LENGTH
    message = types.ResponseMessage(
        content=reply.content,
        reasoning_content=reply.message.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
        is_truncated=is_cut,
        tokens=types.ResponseTokens(
            prompt_ids=prompt.tolist(),
            prompt_mask=[0] * len(prompt),
            completion_ids=completion.token_ids.tolist(),
            completion_mask=[1] * completion.num_tokens,
            completion_logprobs=completion.logprobs.tolist(),
        ),
    )
    usage = types.Usage(
        prompt_tokens=len(prompt),
        reasoning_tokens=0,
        completion_tokens=completion.num_tokens,
        total_tokens=len(prompt) + completion.num_tokens,
    )
    return types.Response(id="", created=int(time.time()), model=MODEL, usage=usage, message=message)


def _as_json(arguments: Mapping[str, Json] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _eval_rows(environment: Any) -> TaskRows:
    """Its own held-out rows; verifiers would fall back on those for training."""
    environment.build_eval_dataset()
    if environment.eval_dataset is None:
        return ()
    rows: TaskRows = environment.get_eval_dataset()
    return rows


def _own_sampling(environment: Any) -> dict[str, Json]:
    """Its sampling arguments, which verifiers merges in for `generate` alone; `extra_body` is empty by default."""
    return {name: value for name, value in environment.sampling_args.items() if name != "extra_body" or value}


def _asks_another(who: str, model: str) -> SettingsError:
    return SettingsError(
        f"{who} asks for the model {model!r} beside the policy (a user simulator?), which Tailrace does not serve: "
        "give the environment a client of its own for it"
    )


def _refuse_what_we_cannot(environment: Any, name: str, rows: Sequence[Mapping[str, Json]]) -> None:
    for method, model in other_models(environment, MODEL):
        raise _asks_another(f"{name}: {method}", model)
    chat_arguments(_own_sampling(environment))
    _require_single_scores(environment, name)
    for row in rows:
        for message in row["prompt"] if isinstance(row.get("prompt"), list) else ():
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part.get("type") != "text":
                    raise SettingsError(
                        f"{name}: its prompts hold content of type {part.get('type')!r}; Tailrace trains on text alone"
                    )


def _require_single_scores(environment: Any, name: str) -> None:
    """Of its members, too, where it is a group of environments."""
    for member in environment.envs if isinstance(environment, _import("verifiers").EnvGroup) else ():
        _require_single_scores(member, name)
    if environment.rubric.has_group_rewards:
        raise SettingsError(
            f"{name}: its rubric scores the rollouts of a group together, and here each is scored when it ends: "
            "write such a function as `score_group`"
        )
    if not environment.score_rollouts:
        raise SettingsError(f"{name}: it was made with score_rollouts = False, so that there is no reward")


def _described(error: object) -> str:
    """An error of verifiers, which it hands out in several forms."""
    return str(error.get("error_chain_repr") or error) if isinstance(error, Mapping) else repr(error)
