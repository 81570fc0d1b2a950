"""Tools of MCP servers: published ones as they are, and ones that misbehave in every way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace.cli import main
from tailrace.environments import (
    AgentResult,
    EnvironmentSettings,
    EnvironmentSpec,
    McpServer,
    Message,
    Policy,
    Task,
    load_environment,
    mcp_agent,
)
from tailrace.errors import EnvironmentFailed, SettingsError, ToolError
from tailrace.free_ports import free_port
from tailrace.records import Json, TaskId
from tailrace.rollouts import ChatRenderer
from tests.environments.adapters.playing import call, play
from tests.support import mcp_servers
from tests.support.descendants import still_run
from tests.support.scripted_policy import Said, ScriptedPolicy, calls

pytest.importorskip("mcp")
HERE = "tests.environments.adapters.test_mcp"
PATIENCE_S = 60.0


def small(mode: str, **limits: Any) -> McpServer:
    return McpServer(command=[*mcp_servers.COMMAND, mode], **limits)


def reward(task: Task, messages: list[Message]) -> float:
    return float(task["answer"] in messages[-1]["content"])


time_zones = EnvironmentSpec(
    name="time-zones",
    agent=mcp_agent(McpServer(command=["mcp-server-time", "--local-timezone", "UTC"])),
    reward=reward,
    train_tasks=[{"prompt": "It is 12:00 in UTC. What time is it in Tokyo?", "answer": "21:00"}],
    trusted=True,
)


async def ask(server: McpServer, *replies: str | Said) -> ScriptedPolicy:
    """Play one rollout with these replies."""
    policy = ScriptedPolicy(replies or [calls("shout", {"word": "hush"}), "Done."])
    task = Task(TaskId("t"), "e", 0, {"prompt": "Shout."})
    result = await mcp_agent(server)(task, policy)
    assert isinstance(result, AgentResult)
    return policy


def left(mode: str) -> list[psutil.Process]:
    """Servers that do not end, though a killed one may take a moment."""
    return still_run(running(mode), PATIENCE_S)


def running(mode: str) -> list[psutil.Process]:
    """Servers that this process has started and that have not ended."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if mode in child.cmdline() else []
    return found


def told(policy: ScriptedPolicy) -> str:
    return policy.conversations[-1][-1]["content"]


async def test_a_published_server_runs_as_it_is(renderer: ChatRenderer) -> None:
    arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    replies = [call("convert_time", **arguments), call("convert_time", time="noon"), "It is 21:00."]
    played = await play(renderer, EnvironmentSettings(name=f"{HERE}:time_zones"), replies)
    rollout = played.rollout
    assert rollout.reward is not None
    assert (rollout.reward.value, rollout.reward.components) == (1.0, {"tool_answers": 2.0, "tool_errors": 1.0})
    answers = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert "T21:00:00+09:00" in json.loads(answers[0])["target"]["datetime"]
    assert answers[1].startswith("error: ")
    assert len(rollout.branches) == 1
    opening = renderer.tokenizer.decode(played.prompts[0])
    assert "Convert time between timezones" in opening


class Front:
    """Stands before a server. Answers each message itself while it is told to, with a status and an error or a text.

    That is what it was told when the message came; `may_answer` of that time holds it back.
    """

    def __init__(self, *, has_sessions: bool = False) -> None:
        """`has_sessions`: by the older revisions of the protocol, which it speaks alone."""
        self._has_sessions = has_sessions
        self.answer: tuple[int, dict[str, Json] | str] | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_asked = asyncio.Event()
        self.headers: dict[bytes, bytes] = {}
        """Of all requests, the newest of each name."""

    def before(self, app: Any) -> Any:
        async def asked(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            self.headers.update(scope["headers"])
            body, more = b"", True
            while more:
                event = await receive()
                body, more = body + event["body"], event["more_body"]
            is_refused = self._has_sessions and json.loads(body).get("method") == "server/discover"
            answer = (404, "<html>") if is_refused else self.answer
            if answer is None:
                events = iter([{"type": "http.request", "body": body, "more_body": False}])

                async def again() -> Any:
                    return next(events, None) or await receive()

                await app(scope, again, send)
                return
            (status, said), may_answer = answer, self.may_answer
            self.was_asked.set()
            await may_answer.wait()
            if isinstance(said, str):
                kind, text = b"text/html", said
            else:
                kind = b"application/json"
                text = json.dumps({"jsonrpc": "2.0", "id": json.loads(body).get("id"), "error": said})
            headers = [(b"content-type", kind), *([(b"location", b"http://127.0.0.2/")] if status == 307 else [])]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})

        return asked


@contextlib.asynccontextmanager
async def served(front: Front | None = None) -> AsyncIterator[str]:
    """A server over HTTP, made with the package's own class; its URL."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shouter")

    @server.tool()
    def shout(word: str) -> str:
        """Shout."""
        return word.upper()

    listening = socket.create_server(("127.0.0.1", 0))
    app = (front or Front()).before(server.streamable_http_app())
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    serving = asyncio.create_task(running.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    finally:
        running.should_exit = True
        await serving


async def test_a_server_behind_a_url_answers() -> None:
    async with served(front := Front()) as url:
        assert told(await ask(McpServer(url=url, headers={"Authorization": "Bearer key"}))) == "HUSH"
    assert front.headers[b"authorization"] == b"Bearer key"


async def test_a_header_has_what_the_variable_holds_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "sesame")
    async with served(front := Front()) as url:
        args: dict[str, Json] = {"url": url, "headers": {"Authorization": "Bearer $MCP_KEY", "X-Price": "5 $$"}}
        spec = load_environment(EnvironmentSettings(name="mcp", args=args), with_tasks=False)
        assert spec.check is not None
        await asyncio.to_thread(spec.check)
    assert (front.headers[b"authorization"], front.headers[b"x-price"]) == (b"Bearer sesame", b"5 $")


async def test_a_command_is_given_what_the_variable_holds_that_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "sesame")
    args: dict[str, Json] = {"command": [*mcp_servers.COMMAND, "env"], "env": {"API_KEY": "${MCP_KEY}"}}
    spec = load_environment(EnvironmentSettings(name="mcp", args=args), with_tasks=False)
    assert spec.agent is not None
    policy = ScriptedPolicy([calls("shout", {"word": "API_KEY"}), "So."])
    await spec.agent(Task(TaskId("t"), "e", 0, {"prompt": "Shout."}), policy)
    assert told(policy) == "sesame"


async def test_in_code_values_are_taken_as_they_are() -> None:
    server = small("env", env={"PROMPT": "$NO_SUCH_KEY, 5 $$"})
    assert told(await ask(server, calls("shout", {"word": "PROMPT"}), "So.")) == "$NO_SUCH_KEY, 5 $$"
    assert "NO_SUCH_KEY" not in repr(server)
    async with served(front := Front()) as url:
        await ask(McpServer(url=url, headers={"X-Price": "5 $"}))
    assert front.headers[b"x-price"] == b"5 $"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"url": "http://x", "headers": {"X-Key": "Bearer $NO_SUCH_KEY"}},
            r"environment\.args\.headers\.X-Key names the variable 'NO_SUCH_KEY', and no such variable is set",
        ),
        ({"command": ["python"], "env": {"KEY": "$NO_SUCH_KEY"}}, r"args\.env\.KEY names the variable 'NO_SUCH_KEY'"),
        ({"command": ["python"], "env": {"PRICE": "$5"}}, "without the name of a variable"),
    ],
)
def test_values_in_settings_that_name_no_variable_are_refused_before_a_run(args: dict[str, Json], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load_environment(EnvironmentSettings(name="mcp", args=args), with_tasks=False)


def test_a_dry_run_says_which_variable_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--environment.name", "mcp", "--environment.args.url", "http://x"]
    headers = ["--environment.args.headers", '{ X-Key = "$NO_SUCH_KEY" }']
    assert main(["train", "quickstart", *own, *headers, "--dry-run"]) == 2
    assert "environment.args.headers.X-Key names the variable 'NO_SUCH_KEY'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "raises", "says"),
    [
        ((503, "<html>"), EnvironmentFailed, "did not answer a call of shout: HTTP 503"),
        ((401, "<html>"), EnvironmentFailed, "did not answer a call of shout: HTTP 401"),
        ((404, "<html>"), EnvironmentFailed, "did not answer a call of shout: HTTP 404"),
        ((404, {"code": -32600, "message": "no such session"}), EnvironmentFailed, "HTTP 404: no such session"),
        ((200, "<html>"), EnvironmentFailed, "did not answer a call of shout: Unexpected content type"),
        ((202, ""), EnvironmentFailed, "did not answer a call of shout: .*202"),
        ((400, "<html>"), EnvironmentFailed, "did not answer a call of shout: HTTP 400"),
        ((400, {"code": -32600, "message": "no such word"}), ToolError, "^no such word$"),
        ((400, {"code": -32700, "message": "no such word"}), ToolError, "^no such word$"),
        ((400, {"code": -32602, "message": "no such word"}), ToolError, "^no such word$"),
        ((200, {"code": -32603, "message": "out of breath"}), ToolError, "^out of breath$"),
        ((200, {"code": -32600, "message": "no such word"}), ToolError, "^no such word$"),
        ((200, {"code": -32000, "message": "no such word"}), ToolError, "^no such word$"),
        ((200, {"code": -32700, "message": "no such word"}), ToolError, "^no such word$"),
        ((200, {"code": "none"}), EnvironmentFailed, "did not answer a call of shout: Failed to parse"),
        ((307, ""), EnvironmentFailed, "did not answer a call of shout: Redirect to"),
    ],
)
async def test_of_a_server_behind_a_url_only_what_it_answers_is_for_the_policy(
    answer: tuple[int, dict[str, Json] | str], raises: type[Exception], says: str
) -> None:
    async with served(front := Front()) as url:
        server = McpServer(url=url, shared=True)
        async with server.tools() as tools:
            front.answer = answer
            with pytest.raises(raises, match=says):
                await tools.functions["shout"](word="hush")
            front.answer = None
        assert told(await ask(server)) == "HUSH"
        await server.close()


async def test_a_server_behind_a_url_that_lost_a_session_costs_its_rollout_and_gives_the_next_another() -> None:
    async with served(front := Front(has_sessions=True)) as url:
        server = McpServer(url=url, shared=True)
        async with server.tools() as tools:
            for status, message in ((400, "no valid session"), (404, "no such session")):
                front.answer = (status, {"code": -32600, "message": message})
                with pytest.raises(EnvironmentFailed, match=f"a call of shout: HTTP {status}: {message}"):
                    await tools.functions["shout"](word="hush")
            front.answer = None
            assert told(await ask(server)) == "HUSH"
        await server.close()


async def test_a_call_that_is_refused_costs_its_own_rollout_and_no_call_beside_it() -> None:
    async with served(front := Front()) as url:
        server = McpServer(url=url, shared=True)
        async with server.tools() as tools:
            front.answer, front.may_answer = (200, {"code": -32603, "message": "out of breath"}), asyncio.Event()
            beside, may_answer = asyncio.create_task(tools.functions["shout"](word="hush")), front.may_answer
            await front.was_asked.wait()
            front.answer, front.may_answer = (503, "<html>"), asyncio.Event()
            front.may_answer.set()
            with pytest.raises(EnvironmentFailed, match="HTTP 503"):
                await tools.functions["shout"](word="hush")
            may_answer.set()
            with pytest.raises(ToolError, match=r"^out of breath$"):
                await beside
            front.answer = None
        await server.close()


async def test_a_server_behind_a_url_that_has_gone_costs_the_rollouts_that_meet_it() -> None:
    async with contextlib.AsyncExitStack() as serving:
        server = McpServer(url=await serving.enter_async_context(served()), shared=True)
        async with server.tools() as tools:
            await serving.aclose()
            for _ in range(2):
                with pytest.raises(EnvironmentFailed, match="a call of shout"):
                    await tools.functions["shout"](word="hush")
        with pytest.raises(EnvironmentFailed, match="the MCP server"):
            await ask(server)
        await server.close()


async def test_nothing_behind_a_url_is_told() -> None:
    url = f"http://127.0.0.1:{free_port()}/mcp"
    with pytest.raises(EnvironmentFailed, match=rf"the MCP server {url} "):
        await ask(McpServer(url=url))


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("talkative", "HUSH"),
        ("refuses", "error: hush is no word"),
        ("protocol-error", "error: no such word"),
        ("structured", '{"word": "hush"}'),
    ],
)
async def test_what_a_server_answers_is_for_the_policy(mode: str, says: str) -> None:
    assert told(await ask(small(mode))) == says


async def test_a_long_result_is_cut_and_says_so() -> None:
    assert told(await ask(small("long", max_result_characters=6))) == "hushhu\n[3994 more characters were left out]"


async def test_only_some_tools_are_offered_and_others_are_unknown() -> None:
    policy = await ask(small("plain", only=["shout"]), calls("whisper", {"word": "hush"}), "Done.")
    assert [[tool["name"] for tool in offered or ()] for offered in policy.tools] == [["shout"]] * 2
    assert told(policy).startswith("error: there is no tool 'whisper'")


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("never-starts", r"ended with status 3; it wrote: no licence"),
        ("killed-at-start", "ended killed by SIGKILL"),
        ("silent", "listed no tools within 0.5 s"),
        ("stubborn", "listed no tools within 0.5 s"),
        ("garbage", "a line of its output is no message: b'INFO nothing"),
        ("no-tools", "lists no tools"),
        ("crashes", "was lost in a call of shout .*it wrote: the disk is full"),
        ("hangs", "did not answer a call of shout within 0.5 s"),
        ("endless", "a line of its output is longer than|did not answer a call of shout within 0.5 s"),
        ("nonsense", "failed in a call of shout"),
        ("image", "content of type 'image': the policy reads text alone"),
    ],
)
async def test_a_server_that_misbehaves_costs_its_rollout_and_leaves_no_process(mode: str, says: str) -> None:
    starts = {"start_timeout_s": 0.5} if mode in ("silent", "stubborn") else {}
    calls_s = {"call_timeout_s": 0.5} if mode in ("hangs", "endless") else {}
    with pytest.raises(EnvironmentFailed, match=says):
        await ask(small(mode, **starts, **calls_s))
    assert not left(mode)


@pytest.mark.parametrize("mode", ["never-starts", "no-tools"])
def test_it_is_tried_once_before_a_run(mode: str) -> None:
    command = [*mcp_servers.COMMAND, mode]
    spec = load_environment(EnvironmentSettings(name="mcp", args={"command": command}), with_tasks=False)
    assert spec.check is not None
    with pytest.raises(SettingsError, match=r"the MCP server .* lists no tools|status 3"):
        spec.check()


def test_a_server_that_does_not_start_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Shout."}\n')
    command = json.dumps([*mcp_servers.COMMAND, "never-starts"])
    arguments = ["--environment.name", "mcp", "--environment.args.command", command, "--environment.data", str(rows)]
    assert main(["train", "quickstart", *arguments, "--dry-run"]) == 2
    assert "it wrote: no licence" in capsys.readouterr().err


async def test_a_server_is_started_per_rollout_or_shared_by_all() -> None:
    async def process_of(server: McpServer) -> str:
        return told(await ask(server))

    own, shared = small("pid"), small("pid", shared=True)
    assert len({await process_of(own) for _ in range(2)}) == 2
    assert len({*await asyncio.gather(*(process_of(shared) for _ in range(4)))}) == 1
    assert running("pid")
    await shared.close()
    assert not left("pid")


async def test_a_shared_server_that_was_lost_is_started_again(tmp_path: Path) -> None:
    server = small("hangs-once", shared=True, call_timeout_s=2, cwd=str(tmp_path))
    with pytest.raises(EnvironmentFailed, match="did not answer"):
        await ask(server)
    assert told(await ask(server)) == "HUSH"
    await server.close()


async def test_rollouts_that_wait_for_one_start_share_its_failure(tmp_path: Path) -> None:
    server = small("leaves-a-trace", shared=True, cwd=str(tmp_path))
    failures = await asyncio.gather(*(ask(server) for _ in range(4)), return_exceptions=True)
    assert [str(one).count("it wrote: no licence") for one in failures] == [1] * 4
    assert len(list(tmp_path.iterdir())) == 1  # start
    with pytest.raises(EnvironmentFailed, match="no licence"):
        await ask(server)
    assert len(list(tmp_path.iterdir())) == 2


async def test_a_start_goes_on_while_somebody_waits_for_it(tmp_path: Path) -> None:
    server = small("waits-to-start", shared=True, cwd=str(tmp_path))
    rollouts = [asyncio.create_task(ask(server)) for _ in range(3)]
    async with asyncio.timeout(20):
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
    rollouts[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollouts[0]
    (tmp_path / "may-start").touch()
    assert [told(one) for one in await asyncio.gather(*rollouts[1:])] == ["HUSH"] * 2
    await server.close()


async def test_a_call_without_an_answer_costs_its_own_rollout_and_none_that_shares_the_server() -> None:
    server = small("hangs-at-times", shared=True, call_timeout_s=3)
    async with server.tools() as tools:
        with pytest.raises(EnvironmentFailed, match="did not answer"):
            await ask(server, calls("shout", {"word": "hang"}), "Done.")
        with pytest.raises(ToolError, match="no such word"):
            await tools.functions["shout"](word="err")
        assert await tools.functions["shout"](word="hush") == "HUSH"
        assert told(await ask(server)) == "HUSH"
        assert len(running("hangs-at-times")) == 2  # the next rollout got another one
    await server.close()
    assert not left("hangs-at-times")


async def test_a_cancelled_rollout_takes_its_server_along() -> None:
    waiting = asyncio.Event()

    class Waits(ScriptedPolicy):
        async def chat(self, messages: list[Message], **_: Any) -> Any:
            waiting.set()
            await asyncio.Event().wait()

    task = Task(TaskId("t"), "e", 0, {"prompt": "Shout."})
    playing = asyncio.ensure_future(mcp_agent(small("cancelled"))(task, Waits([])))
    await waiting.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not left("cancelled")


async def test_two_servers_must_not_have_one_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(TaskId("t"), "e", 0, {"prompt": "Shout."})
    agent = mcp_agent(small("a", only=["shout"]), small("b", only=["whisper"]))
    policy = ScriptedPolicy([calls("whisper", {"word": "hush"}), "Done."])
    await agent(task, policy)
    assert told(policy) == "HUSH"
    with pytest.raises(EnvironmentFailed, match="two MCP servers have a tool 'shout'"):
        await mcp_agent(small("a"), small("b", only=["shout"]))(task, policy)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (McpServer, "either a `command` or a `url`"),
        (lambda: McpServer(command=["x"], url="http://x"), "either a `command` or a `url`"),
        (lambda: McpServer(command="mcp-server-time"), "a list of words"),
        (lambda: McpServer(command=["no-such-mcp-server"]), "no command 'no-such-mcp-server'"),
        (lambda: McpServer(url="localhost:80"), "begins with http"),
        (lambda: McpServer(url="http://x", env={"a": "b"}), "env is not for an MCP server by url"),
        (lambda: McpServer(command=["python"], headers={"a": "b"}), "headers is not for an MCP server by command"),
        (lambda: McpServer(command=["python"], call_timeout_s=0), "must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], McpServer], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(SettingsError, match=r'pip install "tailrace\[mcp\]"'):
        McpServer(command=["python"])


async def test_an_agent_of_ones_own_uses_the_tools_as_any_others() -> None:
    from tailrace.environments import answer_tool_calls

    async def agent(task: Task, policy: Policy) -> float:
        async with small("plain").tools() as tools:
            reply = await policy.chat([{"role": "user", "content": "Shout."}], tools=tools.specs)
            (answer,) = await answer_tool_calls(reply, tools.functions)
            return float(answer["content"] == "HUSH")

    policy = ScriptedPolicy([calls("shout", {"word": "hush"})])
    assert await agent(Task(TaskId("t"), "e", 0, {}), policy) == 1.0
