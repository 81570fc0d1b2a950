"""What runs in the virtual environment of verifiers 0.4: it tells an environment's tasks, and serves its rollouts.

    python -P host.py describe ANSWER     its tasks, or why it cannot be trained on, as JSON in the file ANSWER
    python -P host.py serve ADDRESS       verifiers' own environment server, until it is told to end (SIGTERM)

Standard input holds the request as JSON: `env`, the `[env]` block of verifiers' own settings, and what the two take
beside it. Nothing of Tailrace is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The block of a script's needs, as PEP 723 has it."""
_OTHER_DIALECTS = {"claude_code": "Anthropic's Messages", "codex": "OpenAI's Responses"}
"""Of harnesses that come with verifiers; by tokens it answers chat completions alone."""


class Refused(Exception):
    """It cannot be trained on; the message says why."""


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """Its tasks, and what it says of itself. Raises `Refused`, and whatever its code raises."""
    from verifiers.v1.utils.compile import resolve_runtime_config
    from verifiers.v1.utils.loaders import load_environment

    config, seat = prepared(request["env"])
    agent = getattr(config, seat)
    _refuse_agent(agent, f"env.{seat}", config)
    taskset, limit = load_environment(config).taskset, request["max_tasks"]
    _refuse_pairing(agent, taskset)
    if limit is None and not taskset.bounded:
        raise Refused("its tasks never end: give args.max_tasks")
    rows = []
    for task in taskset if limit is None else taskset.take(limit):
        resolve_runtime_config(agent.runtime, task)
        row = task.data.model_dump(mode="json")
        _refuse_row(row)
        rows.append(row)
    return {"version": version("verifiers"), "tasks": rows}


def prepared(block: dict[str, Any]) -> tuple[Any, str]:
    """The settings, with what Tailrace takes where they say nothing, and the name of the one agent's seat.

    The `null` harness, or the one that the package itself brings, in a process of this machine.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    taskset = block["taskset"]["id"]
    seats = [
        name
        for name, field in env_config_type(taskset, block.get("id") or "").model_fields.items()
        if isinstance(field.default, AgentConfig)
    ]
    if len(seats) != 1:
        raise Refused(
            f"it has {len(seats)} agents ({', '.join(seats)}): a rollout here is one agent's, with one reward; what "
            "plays against another model (a user simulator, a judge that is an agent) cannot be trained on"
        )
    (seat,) = seats
    agent = dict(block.get(seat) or {})
    brought = default_harness_id(taskset)
    agent.setdefault("harness", {"id": "null" if brought == "bash" else brought})
    agent.setdefault("runtime", {"type": "subprocess"})
    return resolve_env_config({**block, seat: agent}), seat


def _refuse_agent(agent: Any, where: str, config: Any) -> None:
    from verifiers.v1.runtimes import runtime_is_local

    if agent.model is not None or agent.client is not None:
        raise Refused(f"{where} has a model or a client of its own, and would not be played by the policy")
    if not runtime_is_local(agent.runtime):
        raise Refused(
            f"{where}.runtime is {agent.runtime.type}, from where the policy could be reached through a tunnel alone: "
            "take subprocess, or a container of this machine (docker, podman, apptainer)"
        )
    for name, retries in ((f"{where}.retries", agent.retries), ("env.retries", config.retries)):
        if retries.max_retries or retries.rules:
            raise Refused(
                f"{name}: what an attempt that failed had sampled would be trained on with the reward of the next; "
                "leave it out, and Tailrace tries again itself (scheduling.max_retries)"
            )
    harness = agent.harness.id
    if (dialect := _OTHER_DIALECTS.get(harness.replace("-", "_"))) is not None:
        raise Refused(
            f"the harness {harness} speaks {dialect}, and verifiers answers by tokens in chat completions alone; run "
            "that program as an agent of its own (docs/agents.md)"
        )


def _refuse_pairing(agent: Any, taskset: Any) -> None:
    """What verifiers itself would refuse at each rollout: tools or containers that the harness or runtime has not."""
    from verifiers.v1.utils.compile import validate_pairing
    from verifiers.v1.utils.loaders import load_harness

    task = type(taskset).task_type()
    tools = [*type(taskset).toolsets(taskset.config), *task.toolsets(taskset.config.task)]
    validate_pairing(load_harness(agent.harness), task, agent.runtime, tools=tools)


def _refuse_row(row: dict[str, Any]) -> None:
    prompt, number = row.get("prompt"), row.get("idx")
    if prompt is None:
        raise Refused(f"task {number} has no prompt: a user would open the conversation, and there is none")
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") != "text":
                raise Refused(
                    f"the prompt of task {number} holds content of type {part.get('type')!r}; Tailrace trains on text"
                )


def serve(request: dict[str, Any], address: str) -> None:
    """Answer at the address until SIGTERM, or the end of what this process was started by."""
    from verifiers.v1.serve.pool import serve_env

    run_scripts_here()
    config, _ = prepared(request["env"])
    serve_env(max_workers=1, address=address, config=config, max_concurrent=request["concurrency"])


def run_scripts_here() -> None:
    """Run harnesses' scripts with this interpreter where it has what they need.

    verifiers would have `uv` make an environment for each of them, from whatever the index has that day. Those of the
    `null` and `bash` harnesses need what verifiers itself needs, so that nothing is fetched for them.
    """
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    with_uv = SubprocessRuntime.prepare_uv_script

    @functools.wraps(with_uv)
    async def prepare_uv_script(self: Any, script: str | bytes, *args: Any, **kwargs: Any) -> Any:
        source = script.encode() if isinstance(script, str) else script
        path = Path(self.scripts_dir) / f"{hashlib.sha256(source).hexdigest()}.py"
        if str(path) not in self._uv_interpreters and _has_all(_needs(source.decode())):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fresh.write_bytes(source)
            fresh.replace(path)
            self._uv_interpreters[str(path)] = sys.executable
        return await with_uv(self, script, *args, **kwargs)

    SubprocessRuntime.prepare_uv_script = prepare_uv_script


def _needs(script: str) -> list[str] | None:
    """The requirements that a script declares; None where it declares nothing."""
    found = _SCRIPT.search(script)
    if found is None:
        return None
    lines = found["content"].splitlines()
    declared = tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))
    return list(declared.get("dependencies", []))


def _has_all(requirements: Iterable[str] | None) -> bool:
    from packaging.requirements import Requirement

    if requirements is None:
        return False
    with contextlib.suppress(PackageNotFoundError):
        wanted = [one for one in map(Requirement, requirements) if one.marker is None or one.marker.evaluate()]
        return all(one.url is None and one.specifier.contains(version(one.name), prereleases=True) for one in wanted)
    return False


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    request = json.load(sys.stdin)
    if arguments[0] == "serve":
        serve(request, arguments[1])
        return
    try:
        answer = describe(request)
    except Refused as error:
        answer = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever the code of others raises is told to the user
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(arguments[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
