"""The environment "verifiers-v1": environments of verifiers 0.4, by the name of their package.

tailrace environments install verifiers==0.4.0
--environment.name verifiers-v1 --environment.args.id my-environment

policy ─endpoint─► its address and key ─► verifiers' server ─► harness, a process ─► its interception ─► tokens
   ▲                                                                                                       │
   └───────────────────── POST /inference/v1/generate, with X-Session-ID ──────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from tailrace.environments.adapters.verifiers_v1.server import VerifiersServer
from tailrace.environments.adapters.verifiers_v1.wire import Reward, Trace
from tailrace.environments.installed import find_installed
from tailrace.environments.protocol import Agent, ChatFormat, Endpoint, EnvironmentSpec, Policy
from tailrace.environments.results import AgentResult
from tailrace.environments.rows import LazyRows, Row
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.records import Json, Task

VERSION = "verifiers==0.4.0"
_TEMPLATE: Mapping[str, Json] = {"name": "default", "tool_parser": "qwen3", "reasoning_parser": "think"}
"""How `renderers` renders by a chat template, and reads tool calls and reasoning as `ChatRenderer` does."""
_NO_KEY = "TAILRACE_NO_KEY"
"""A variable that is not set: verifiers would send the user's own key of another service."""


def verifiers_v1(
    *,
    id: str,
    path: str | None = None,
    env: dict[str, Json] | None = None,
    max_tasks: int | None = None,
    renderer: dict[str, Json] | None = None,
    python: str | None = None,
    concurrency: int = 16,
    start_timeout_s: float = 120.0,
    **taskset: Json,
) -> EnvironmentSpec:
    """The environment of the package `id`; all other arguments are its taskset's own settings.

    `path` is the folder that holds the package, if it is not installed. `env` is verifiers' `[env]` block (harness,
    runtime, limits, ...). `renderer` says how its client turns chats into tokens, as `renderers` has it; by default as
    Tailrace does. `python` is an interpreter that has verifiers 0.4, in place of the one that `tailrace environments
    install` makes.

    Raises `SettingsError` where verifiers is not installed, or values make no sense; what the environment asks for and
    Tailrace has not is told when its tasks are looked at.
    """
    if concurrency < 1 or start_timeout_s <= 0 or (max_tasks is not None and max_tasks < 1):
        raise SettingsError("verifiers-v1: args.concurrency, args.start_timeout_s and args.max_tasks are above 0")
    if path is not None and not Path(path).is_dir():
        raise SettingsError(f"environment.args.path is {path!r}, and there is no such folder", key=("args", "path"))
    own = dict(env or {})
    own_taskset = own.get("taskset")
    own["taskset"] = {**(own_taskset if isinstance(own_taskset, dict) else {}), **taskset, "id": id}
    server = VerifiersServer(
        python=find_installed(VERSION, needed_by="verifiers-v1") if python is None else Path(python),
        env=own,
        path=None if path is None else Path(path).absolute(),
        max_tasks=max_tasks,
        concurrency=concurrency,
        start_timeout_s=start_timeout_s,
    )
    return EnvironmentSpec(
        name=id.rpartition("/")[2].partition("@")[0],
        description=f"{server}, played and scored by its own server.",
        agent=verifiers_agent(server, renderer=renderer),
        train_tasks=_Tasks(server),
        check=lambda: _look_at(server),
        close=server.close,
    )


def verifiers_agent(server: VerifiersServer, *, renderer: Mapping[str, Json] | None = None) -> Agent:
    """An agent whose rollouts are played by the server; the tasks are its own."""

    async def agent(task: Task, policy: Policy) -> AgentResult:
        async with policy.endpoint() as endpoint:
            trace = await server.play(task.row, client_of(endpoint, renderer))
            if not policy.messages:
                raise EnvironmentFailed(f"{server}: its harness ended without a reply of the model")
        return result_of(trace)

    return agent


def client_of(endpoint: Endpoint, renderer: Mapping[str, Json] | None = None) -> dict[str, Json]:
    """Where a rollout's policy answers, as verifiers' settings of a client for training have it."""
    chats = endpoint.chat_format
    if chats is None:
        raise SettingsError("verifiers' client turns chats into tokens, and a simulated model has no tokenizer")
    return {
        "type": "train",
        "base_url": endpoint.openai_url,
        "api_key_var": _NO_KEY,
        "headers": {"x-api-key": endpoint.key},
        "renderer_model_name": chats.tokenizer,
        "renderer": dict(renderer or _renderer(chats)),
    }


def result_of(trace: Trace) -> AgentResult:
    """What a trace earned: the weighted sum of its rewards, each of them and the metrics, and what it noted.

    Raises `EnvironmentFailed` where a reward was not computed.
    """
    rewards: dict[str, Reward] = {}
    for name, reward in trace.rewards.items():
        if reward is None:
            raise EnvironmentFailed(f"verifiers ended with {trace.stop_condition}, and did not compute {name}")
        rewards[name] = reward
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    scores = {name: reward.score for name, reward in rewards.items()}
    total = sum(reward.score * reward.weight for reward in rewards.values()) if rewards else None
    noted: Any = msgspec.to_builtins(trace.info, str_keys=True)
    own = {"stop_condition": trace.stop_condition, "session_id": trace.trace_id}
    return AgentResult(total, {**metrics, **scores}, {**noted, **own})


def _renderer(chats: ChatFormat) -> Mapping[str, Json]:
    if chats.family is None:
        return _TEMPLATE
    kept: Mapping[str, Json] = {"thinking_retention": "all"} if chats.keeps_reasoning else {}
    return {"name": chats.family, **kept}


def _look_at(server: VerifiersServer) -> None:
    """Tell before a run what cannot be trained on, even where the rows come from elsewhere."""
    assert server.tasks  # there is one, or that has been told


class _Tasks(LazyRows):
    """The server's tasks, asked for when they are looked at: a process that only plays them has no need to."""

    def __init__(self, server: VerifiersServer) -> None:
        self._server = server

    @override
    def __len__(self) -> int:
        return len(self._server.tasks)

    @override
    def _row(self, position: int) -> Row:
        return self._server.tasks[position]
