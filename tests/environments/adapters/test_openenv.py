"""Environments of OpenEnv: by URL over WebSocket and HTTP, and started from a package as `openenv init` writes it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import pytest

from tailrace.environments import (
    AgentResult,
    EnvironmentSettings,
    EnvironmentSpec,
    Json,
    OpenEnvServer,
    Reply,
    load_environment,
    openenv_environment,
)
from tailrace.environments.adapters import openenv_server
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.free_ports import free_port
from tailrace.rollouts import ChatRenderer
from tests.environments.adapters.playing import play
from tests.support import openenv_servers as fakes
from tests.support.installed_openenv import installed_openenv
from tests.support.scripted_policy import Said, ScriptedPolicy, calls

websockets_client = pytest.importorskip("websockets.asyncio.client")


async def rollout(spec: EnvironmentSpec, *replies: str | Said, index: int = 0) -> tuple[AgentResult, ScriptedPolicy]:
    policy = ScriptedPolicy(replies)
    assert spec.agent is not None
    result = await spec.agent(spec.train_task(index), policy)
    assert isinstance(result, AgentResult)
    return result, policy


def at(url: str, **more: Any) -> EnvironmentSpec:
    return openenv_environment(OpenEnvServer(url=url, **more))


async def test_replies_are_actions_and_observations_messages(renderer: ChatRenderer) -> None:
    async with fakes.served(fakes.FakeServer()) as server:
        environment = EnvironmentSettings(name="openenv", args={"url": server.url, "system_prompt": "Be brief."})
        played = await play(renderer, environment, ["hush", "stop"])
    assert played.rollout.reward is not None
    assert played.rollout.reward.value == pytest.approx(0.8)
    assert played.rollout.reward.components == {"steps": 2.0, "invalid_actions": 0.0}
    said = [(message["role"], message["content"]) for message in played.rollout.messages]
    assert said == [
        ("system", "Be brief."),
        ("user", "Say a word."),
        ("assistant", "hush"),
        ("user", "HUSH"),
        ("assistant", "stop"),
    ]
    assert server.actions == [{"word": "hush"}, {"word": "stop"}]


async def test_rollouts_of_a_task_are_reset_alike_and_those_of_others_not() -> None:
    async with fakes.served(fakes.FakeServer()) as server:
        spec = at(server.url, headers={"Authorization": "Bearer key"})
        for index in (3, 3, 4):
            await rollout(spec, "stop", index=index)
        level = openenv_environment(
            OpenEnvServer(url=server.url), train_tasks=[{"prompt": "Go.", "level": 2, "seed": 7}]
        )
        _, policy = await rollout(level, "stop")
        asked = ({"role": "system", "content": "Go."},)
        listed = openenv_environment(OpenEnvServer(url=server.url), train_tasks=[{"prompt": asked}])
        _, told = await rollout(listed, "stop")
    seeds = [reset["seed"] for reset in server.resets]
    assert seeds[0] == seeds[1] != seeds[2]
    assert server.resets[3] == {"seed": 7, "level": 2}
    assert policy.conversations[0] == [{"role": "user", "content": "Go.\n\nSay a word."}]
    assert told.conversations[0] == [*asked, {"role": "user", "content": "Say a word."}]
    assert server.headers[:3] == ["Bearer key"] * 3


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_a_header_has_what_the_variable_holds_that_it_names(
    monkeypatch: pytest.MonkeyPatch, transport: Literal["websocket", "http"]
) -> None:
    monkeypatch.setenv("OPENENV_KEY", "sesame")
    async with fakes.served(fakes.FakeServer()) as server:
        headers: dict[str, Json] = {"Authorization": "Bearer $OPENENV_KEY"}
        args: dict[str, Json] = {"url": server.url, "headers": headers, "transport": transport}
        await rollout(load_environment(EnvironmentSettings(name="openenv", args=args)), "stop")
        assert {*server.headers} == {"Bearer sesame"}
        server.headers.clear()
        await rollout(at(server.url, headers={"Authorization": "Bearer $in-code"}, transport=transport), "stop")
        assert {*server.headers} == {"Bearer $in-code"}


async def test_an_action_of_several_fields_is_a_tool_and_wrong_ones_are_told() -> None:
    async with fakes.served(fakes.FakeServer(action=fakes.MOVE)) as server:
        spec = at(server.url)
        result, policy = await rollout(spec, "Left.", calls("step", {"why": "so"}), calls("step", {"to": 12}))
    (tool,) = policy.tools[0] or ()
    assert (tool["name"], tool["description"], tool["parameters"]["required"]) == ("step", "Move.", ["to"])
    assert list(tool["parameters"]["properties"]) == ["to", "why"]
    shown = [conversation[-1] for conversation in policy.conversations[1:]]
    assert shown[0] == {"role": "user", "content": "error: call the tool 'step' once"}
    assert shown[1]["content"] == "error: to is missing"
    assert (result.reward, result.metrics) == (0.2, {"steps": 1.0, "invalid_actions": 2.0})


async def test_replies_that_are_no_action_are_worth_nothing() -> None:
    def never(reply: Reply) -> Mapping[str, Json]:
        raise ValueError("not this")

    async with fakes.served(fakes.FakeServer()) as server:
        result, policy = await rollout(openenv_environment(OpenEnvServer(url=server.url), action=never), "a", "b")
        form = openenv_environment(OpenEnvServer(url=server.url), action="json", observation=lambda seen: f"<{seen}>")
        other, told = await rollout(form, 'I say {"word": "stop"}.')
    assert (result.reward, result.metrics["invalid_actions"]) == (0.0, 2.0)
    assert policy.conversations[1][-1]["content"] == "error: not this"
    assert other.reward == 0.4
    assert told.conversations[0][-1]["content"] == "<{'text': 'Say a word.'}>"


async def test_a_full_server_is_waited_for() -> None:
    async with fakes.served(fakes.FakeServer(capacity=2)) as server:
        spec = at(server.url)
        results = await asyncio.gather(*(rollout(spec, "hush", "stop") for _ in range(8)))
    assert [result.reward for result, _ in results] == [pytest.approx(0.8)] * 8
    assert (server.most, server.open) == (2, 0)


async def test_a_server_that_is_full_with_others_is_told() -> None:
    async with fakes.served(fakes.FakeServer(capacity=0)) as server:
        with pytest.raises(EnvironmentFailed, match="has no free session: 1 of 1 sessions"):
            await rollout(at(server.url, start_timeout_s=2), "hush")


async def test_http_is_the_fallback_of_a_server_without_a_websocket() -> None:
    async with fakes.served(fakes.FakeServer(has_websocket=False)) as server:
        result, _ = await rollout(at(server.url), "hush", "stop")
        assert result.reward == pytest.approx(0.8)
        with pytest.raises(EnvironmentFailed, match="has no WebSocket"):
            await rollout(at(server.url, transport="websocket"), "hush")


async def test_a_refused_handshake_costs_its_rollout_and_others_keep_their_sessions() -> None:
    async with fakes.served(fakes.FakeServer(refuses_with=[503, 401])) as server:
        spec = at(server.url)
        for status in (503, 401):
            with pytest.raises(EnvironmentFailed, match=f"opened no WebSocket, though it may have one: .*{status}"):
                await rollout(spec, "hush")
        await rollout(spec, "hush", "stop")
    assert server.most == 1  # session: the one that a WebSocket is


async def test_a_handshake_that_breaks_off_costs_its_rollout() -> None:
    schema = json.dumps({"action": fakes.WORD, "observation": {}, "state": {}}).encode()

    async def answer_http_alone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/schema" in await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(schema) + schema)
        writer.close()

    async with await asyncio.start_server(answer_http_alone, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentFailed, match="opened no WebSocket: "):
            await rollout(at(f"http://127.0.0.1:{port}"), "hush")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("garbage", "answered a reset with what is no JSON"),
        ("raises", "failed in a step: division by zero"),
        ("leaves", "closed the connection in a step"),
        ("hangs", "did not answer a step within 0.5 s"),
    ],
)
async def test_a_server_that_fails_costs_its_rollout(fault: str, says: str) -> None:
    limit = {"step_timeout_s": 0.5} if fault == "hangs" else {}
    async with fakes.served(fakes.FakeServer(fault=fault)) as server:
        with pytest.raises(EnvironmentFailed, match=says):
            await rollout(at(server.url, **limit), "hush")


async def test_it_is_tried_once_before_a_run() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    nothing = load_environment(EnvironmentSettings(name="openenv", args={"url": url}))
    assert nothing.check is not None
    with pytest.raises(SettingsError, match="cannot be asked"):
        await asyncio.to_thread(nothing.check)
    tools = {"properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
    async with fakes.served(fakes.FakeServer(action=tools)) as server:
        spec = at(server.url)
        assert spec.check is not None
        with pytest.raises(SettingsError, match="reach it as an MCP server"):
            await asyncio.to_thread(spec.check)
        server.action = fakes.WORD
        await asyncio.to_thread(spec.check)


async def test_a_package_whose_server_does_not_start_is_told_with_what_it_wrote() -> None:
    spec = load_environment(EnvironmentSettings(name="openenv", args={"package": "no_such_env"}))
    assert spec.check is not None
    with pytest.raises(SettingsError, match=r"(?s)the OpenEnv server no_such_env .*No module named 'no_such_env'"):
        await asyncio.to_thread(spec.check)


_HELD_APP = """
import json, time
from pathlib import Path

Path("begun").touch()
while not Path("may_start").exists():
    time.sleep(0.02)

async def app(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps({"observation": "hi"}).encode()})
"""


@pytest.mark.parametrize("was_up", [False, True])
async def test_a_rollout_cancelled_while_the_server_starts_leaves_it_to_the_next(tmp_path: Path, was_up: bool) -> None:
    (tmp_path / "held_env" / "server").mkdir(parents=True)
    (tmp_path / "held_env" / "server" / "app.py").write_text(_HELD_APP)
    may_start, begun = tmp_path / "may_start", tmp_path / "begun"
    server = OpenEnvServer(package="held_env", cwd=str(tmp_path), transport="http")

    async def first_observation() -> Json:
        async with server.session({"seed": 1}) as (_, first):
            return first["observation"]

    try:
        if was_up:
            may_start.touch()
            assert await first_observation() == "hi"
            await server.close()
            may_start.unlink()
            begun.unlink()
        starting = asyncio.create_task(first_observation())
        async with asyncio.timeout(60):
            while not begun.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.02)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not _servers_of("held_env")
        may_start.touch()
        assert await first_observation() == "hi"
    finally:
        await server.close()


async def test_rollouts_that_wait_for_one_start_share_its_failure(tmp_path: Path) -> None:
    (tmp_path / "broken_env" / "server").mkdir(parents=True)
    app = tmp_path / "broken_env" / "server" / "app.py"
    app.write_text("import os\nopen(f'begun-{os.getpid()}', 'w').close()\nraise RuntimeError('no licence')")
    server = OpenEnvServer(package="broken_env", cwd=str(tmp_path))
    failures = await asyncio.gather(
        *(rollout(openenv_environment(server), "hush") for _ in range(4)), return_exceptions=True
    )
    assert ["no licence" in str(one) for one in failures] == [True] * 4
    assert len(list(tmp_path.glob("begun-*"))) == 1
    with pytest.raises(EnvironmentFailed, match="no licence"):
        await rollout(openenv_environment(server), "hush")
    assert len(list(tmp_path.glob("begun-*"))) == 2


_HANGING_APP = """
import json, time
from pathlib import Path

def observed(kind):
    if kind == "step" and Path("is_to_hang").exists():
        time.sleep(float(Path("is_to_hang").read_text()))
    return {"observation": "hi"}

async def app(scope, receive, send):
    if scope["type"] == "http":
        text = json.dumps(observed(scope["path"][1:]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})
    elif scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        while (event := await receive())["type"] != "websocket.disconnect":
            if event["type"] == "websocket.receive":
                answer = {"type": "observation", "data": observed(json.loads(event["text"])["type"])}
                await send({"type": "websocket.send", "text": json.dumps(answer)})
"""


@pytest.mark.parametrize(
    ("transport", "says"),
    [("http", "cannot be asked: ReadTimeout"), ("websocket", "did not answer a step within 2 s")],
)
async def test_a_server_that_was_started_here_and_hangs_is_replaced(
    transport: Literal["http", "websocket"], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"ping_interval": 0.1, "ping_timeout": 0.1, "close_timeout": 0.1}  # 20, 20 and 10 otherwise
    impatient = partial(websockets_client.connect, **seconds)
    monkeypatch.setattr(websockets_client, "connect", impatient)
    monkeypatch.setattr(openenv_server, "_HUNG_S", 1.0)
    server = _hanging(tmp_path, for_s=600, transport=transport)
    try:
        async with server.session({"seed": 1}) as (session, _):
            with pytest.raises(EnvironmentFailed, match=says):
                await session.step({})
        assert not _servers_of("hanging_env")
        (tmp_path / "is_to_hang").unlink()
        async with server.session({"seed": 1}) as (session, _):
            assert await session.step({}) == {"observation": "hi"}
    finally:
        await server.close()


async def test_a_server_that_is_busy_for_longer_than_a_step_may_take_keeps_its_sessions(tmp_path: Path) -> None:
    server = _hanging(tmp_path, for_s=5, transport="http")
    try:
        async with server.session({"seed": 1}) as (session, _), server.session({"seed": 2}) as (beside, _):
            (process,) = _servers_of("hanging_env")
            with pytest.raises(EnvironmentFailed, match="cannot be asked: ReadTimeout"):
                await session.step({})
            (tmp_path / "is_to_hang").unlink()
            assert await beside.step({}) == {"observation": "hi"}
            assert _servers_of("hanging_env") == [process]
    finally:
        await server.close()


async def test_sessions_of_a_server_that_hangs_look_at_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    get = httpx.AsyncClient.get

    async def noted(self: httpx.AsyncClient, url: str, **more: Any) -> httpx.Response:
        looked.append(url)
        return await get(self, url, **more)

    server = _hanging(tmp_path, for_s=600, transport="http")
    try:
        async with server.session({"seed": 1}) as (session, _), server.session({"seed": 2}) as (beside, _):
            monkeypatch.setattr(httpx.AsyncClient, "get", noted)
            monkeypatch.setattr(openenv_server, "_HUNG_S", 1.0)
            failures = await asyncio.gather(session.step({}), beside.step({}), return_exceptions=True)
        assert [type(one) for one in failures] == [EnvironmentFailed] * 2
        assert looked == ["/health"]
    finally:
        await server.close()


def _hanging(folder: Path, *, for_s: float, transport: Literal["http", "websocket"]) -> OpenEnvServer:
    (folder / "hanging_env" / "server").mkdir(parents=True)
    (folder / "hanging_env" / "server" / "app.py").write_text(_HANGING_APP)
    (folder / "is_to_hang").write_text(str(for_s))
    return OpenEnvServer(package="hanging_env", cwd=str(folder), transport=transport, step_timeout_s=2)


def _servers_of(package: str) -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if package in " ".join(one.cmdline())]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (OpenEnvServer, "either a `url` or a `package`"),
        (lambda: OpenEnvServer(url="localhost:8000"), "begins with http"),
        (lambda: OpenEnvServer(url="http://x", step_timeout_s=0), "must be above 0"),
        (
            lambda: load_environment(
                EnvironmentSettings(name="openenv", args={"url": "http://x", "headers": {"X-Key": "$NO_SUCH_KEY"}})
            ),
            "X-Key names the variable 'NO_SUCH_KEY'",
        ),
        (lambda: openenv_environment(OpenEnvServer(url="http://x"), action="tool", action_field="w"), "action_field"),
        (lambda: load_environment(EnvironmentSettings(name="openenv", args={"ulr": "x"})), "did you mean 'url'"),
        (lambda: load_environment(EnvironmentSettings(name="openenv", args={"transport": "pigeon"})), "transport"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(SettingsError, match=r'pip install "tailrace\[openenv\]"'):
        OpenEnvServer(url="http://127.0.0.1")


@pytest.mark.long
async def test_a_fresh_scaffold_of_openenv_runs_as_it_is(tmp_path: Path, renderer: ChatRenderer) -> None:
    openenv_python = installed_openenv()
    command = [Path(openenv_python).with_name("openenv"), "init", "shouting_env"]
    made = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr + made.stdout
    args: Any = {"package": "shouting_env", "python": openenv_python, "cwd": str(tmp_path), "start_timeout_s": 200}
    args["observation_field"] = "echoed_message"
    environment = EnvironmentSettings(name="openenv", args=args, max_turns=2)
    played = await play(renderer, environment, ["Hello", "Good evening"], times=2)
    for one in played.rollouts:
        assert one.reward is not None
        assert one.reward.value == pytest.approx(0.5 + 1.0)
        assert [message["content"] for message in one.messages][1:] == ["Hello", "Hello", "Good evening"]
    check = played.spec.check
    assert check is not None
    await asyncio.to_thread(check)
    assert not _servers_of("shouting_env")
