"""The tools of an MCP server, started by a command or reached under a URL.

    server = McpServer(command=["mcp-server-time"])

    async def agent(task, policy):
        async with server.tools() as tools:
            reply = await policy.chat(messages, tools=tools.specs)
            messages += [reply.message, *await answer_tool_calls(reply, tools.functions)]

What the server answers to a call, errors of its tools included, is for the policy; a server that is gone, refuses a
request over HTTP, hangs or writes garbage costs the rollout that meets it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tailrace.environments.adapters.servers import look_once
from tailrace.environments.adapters.shared_attempt import SharedAttempt
from tailrace.environments.tools import Tool
from tailrace.errors import EnvironmentFailed, SettingsError, ToolError
from tailrace.extras import import_extra
from tailrace.records import Json, ToolSpec
from tailrace.timeouts import timeout

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, MCPError
    from mcp_types import CallToolResult, ContentBlock

    from tailrace.environments.adapters.mcp_stdio import StdioTransport

_MAX_PAGES = 100
_HTTP_READ_S = 300.0
"""For a stream of events, which may be silent."""
_CLOSE_S = 5.0
"""That closing a connection may take before its task is cancelled."""
_CLIENT_SAYS = (
    "Connection closed",
    "SSE stream ",
    "Failed to parse ",
    "Redirect to ",
    "Unexpected content type: ",
    "server answered a request with 202",
)
"""How errors begin that the package's client makes of what HTTP fails with, under codes that servers use as well."""
_refusals: ContextVar[list[int] | None] = ContextVar("refusals", default=None)
"""Statuses with which messages of the call under way were refused: the client sends them in the call's context."""


@dataclass(frozen=True)
class McpTools:
    """Tools of a server that runs."""

    specs: list[ToolSpec]
    """For `policy.chat(tools=...)`."""
    functions: dict[str, Tool]
    """By name, for `answer_tool_calls`."""


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """Where an MCP server comes from, and its limits. Give a `command` (stdio) or a `url` (streamable HTTP).

    Raises `SettingsError` where both or neither are given, there is no such command, or the package is missing.
    """

    command: Sequence[str] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the command, as they are given, beside a few that it inherits (PATH, HOME, ...)."""
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with each request to the `url`, as they are given."""
    only: Sequence[str] | None = None
    """Names of the tools to offer; None: all of them."""
    shared: bool = False
    """One server for all rollouts of a process, for tools without a state; otherwise one for each rollout."""
    start_timeout_s: float = 30.0
    """To start, and to list its tools."""
    call_timeout_s: float = 30.0
    max_result_characters: int = 20_000
    """Of one result; what is longer is cut, and says so."""
    _shared: _SharedConnection = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.command, str):
            raise SettingsError(f"an MCP server's command is a list of words, not {self.command!r}")
        if bool(self.command) == (self.url is not None):
            raise SettingsError("an MCP server has either a `command` or a `url`")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise SettingsError(f"the url of an MCP server is {self.url!r}; it begins with http:// or https://")
        odd = [name for name in (("env", "cwd") if self.url is not None else ("headers",)) if getattr(self, name)]
        if odd:
            raise SettingsError(f"{odd[0]} is not for an MCP server by {'url' if self.url else 'command'}")
        if min(self.start_timeout_s, self.call_timeout_s, self.max_result_characters) <= 0:
            raise SettingsError("the limits of an MCP server must be above 0")
        import_extra("mcp", extra="mcp", what="an MCP server")
        if self.command:
            from tailrace.environments.adapters.mcp_stdio import server_environment

            path = {**server_environment(), **self.env}["PATH"]
            if shutil.which(self.command[0], path=path) is None:
                raise SettingsError(f"there is no command {self.command[0]!r}, which an MCP server is to be started by")
        object.__setattr__(self, "_shared", _SharedConnection(self))

    def __str__(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"

    @asynccontextmanager
    async def tools(self) -> AsyncIterator[McpTools]:
        """Its tools, for one rollout; the server that was started for it ends with it.

        Raises `EnvironmentFailed` where it does not start, or lists no tools, in time.
        """
        connection = await self._shared.acquire() if self.shared else await _Connection.open(self)
        try:
            yield connection.tools
        finally:
            if self.shared:
                await self._shared.release(connection)
            else:
                await connection.close()

    async def close(self) -> None:
        """End a server that is shared. No rollout may use it."""
        await self._shared.close()

    def check(self) -> None:
        """Start it once and list its tools. Raises `SettingsError` where that fails."""

        async def look() -> None:
            await (await _Connection.open(self)).close()

        look_once(look())


class _Connection:
    """A client and its server. A task of its own holds both, so that no cancelled rollout leaves a server behind."""

    tools: McpTools

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.users = 0
        self._closing = asyncio.Event()
        self._transport: StdioTransport | None = None
        self._client: Client | None = None
        self._has_sessions = True
        """By the revision of the protocol that it speaks: a server may forget a session, and refuse its calls."""
        self._listed: asyncio.Future[list[ToolSpec]] = asyncio.get_running_loop().create_future()
        self._is_doubtful = False
        """A call met no answer, or garbage: those who use it may go on, and no other rollout is given it."""
        self._holder = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, server: McpServer) -> _Connection:
        """Raises `EnvironmentFailed` where it lists no tools in time."""
        connection = cls(server)
        try:
            async with timeout(server.start_timeout_s):
                specs = await asyncio.shield(connection._listed)
        except TimeoutError:
            late = connection._failed(f"listed no tools within {server.start_timeout_s:g} s")
            await connection.close()
            raise late from None
        except BaseException:
            await connection.close()
            raise
        functions: dict[str, Tool] = {spec["name"]: partial(connection._call, spec["name"]) for spec in specs}
        connection.tools = McpTools(specs, functions)
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether another rollout may use it."""
        return not (self._is_doubtful or self._closing.is_set() or self._has_ended)

    async def close(self) -> None:
        """End the server, and wait until it has ended."""
        self._closing.set()
        if not self._listed.done():
            self._holder.cancel()
        await asyncio.wait({self._holder}, timeout=_CLOSE_S)
        self._holder.cancel()
        await asyncio.wait({self._holder})

    async def _hold(self) -> None:
        from mcp import Client
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        try:
            async with self._connecting() as transport, Client(transport, cache=None) as client:
                self._client = client
                self._has_sessions = client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS
                self._listed.set_result(await self._list(client))
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  it is raised where the server is waited for
            if not self._listed.done():
                known = error if isinstance(error, EnvironmentFailed) else self._failed(_said(error))
                self._listed.set_exception(known)
                self._listed.exception()  # nobody may be left to ask for it

    @asynccontextmanager
    async def _connecting(self) -> AsyncIterator[Any]:
        """What a `Client` connects through."""
        server = self.server
        if server.url is None:
            from tailrace.environments.adapters.mcp_stdio import StdioTransport

            self._transport = StdioTransport(server.command, env=server.env, cwd=server.cwd)
            yield self._transport
            return
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(server.start_timeout_s, read=max(server.call_timeout_s, _HTTP_READ_S))
        async with httpx2.AsyncClient(
            headers=dict(server.headers), timeout=limits, event_hooks={"response": [_note_refusal]}
        ) as client:
            yield streamable_http_client(server.url, http_client=client)

    async def _list(self, client: Client) -> list[ToolSpec]:
        found: dict[str, ToolSpec] = {}
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                found[tool.name] = ToolSpec(
                    name=tool.name, description=tool.description or "", parameters=tool.input_schema
                )
            cursor = page.next_cursor
            if cursor is None:
                break
        if not found:
            raise self._failed("lists no tools")
        if self.server.only is None:
            return list(found.values())
        if missing := [name for name in self.server.only if name not in found]:
            raise self._failed(f"has no tool {missing[0]!r}; it has: {', '.join(found)}")
        return [found[name] for name in self.server.only]

    async def _call(self, name: str, /, **arguments: Json) -> str:
        """What a tool answers. Raises `ToolError` for what the policy may read, else `EnvironmentFailed`."""
        from mcp import MCPError

        assert self._client is not None  # tools are listed by a client
        limit_s, refusals = self.server.call_timeout_s, list[int]()
        context = _refusals.set(refusals)
        try:
            async with timeout(limit_s):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError:
            self._is_doubtful = True
            raise self._failed(f"did not answer a call of {name} within {limit_s:g} s") from None
        except MCPError as error:
            if self._has_ended:
                if self._transport is not None:
                    await self._transport.said_all()
                raise self._failed(f"was lost in a call of {name}") from error
            if self.server.url is not None and not _is_answer(error, refusals, has_sessions=self._has_sessions):
                self._is_doubtful = True
                said = ": ".join([*(f"HTTP {status}" for status in refusals[-1:]), error.message])
                raise self._failed(f"did not answer a call of {name}: {said}") from error
            raise ToolError(error.message) from error
        except Exception as error:
            self._is_doubtful = True
            raise self._failed(f"failed in a call of {name}: {_said(error)}") from error
        finally:
            _refusals.reset(context)
        content = self._text(name, result)
        if result.is_error:
            raise ToolError(content)
        return content

    @property
    def _has_ended(self) -> bool:
        """A process tells of its end a moment after its output ends."""
        return self._holder.done() or (self._transport is not None and not self._transport.is_open)

    def _text(self, name: str, result: CallToolResult) -> str:
        parts = [self._block_text(name, block) for block in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content)]
        text, most = "\n".join(parts), self.server.max_result_characters
        return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters were left out]"

    def _block_text(self, name: str, block: ContentBlock) -> str:
        if block.type == "text":
            return block.text
        if block.type == "resource_link":
            return str(block.uri)
        if block.type == "resource" and hasattr(block.resource, "text"):
            return str(block.resource.text)
        raise self._failed(
            f"answered a call of {name} with content of type {block.type!r}: the policy reads text alone"
        )

    def _failed(self, what: str) -> EnvironmentFailed:
        known = "" if self._transport is None else self._transport.describe()
        return EnvironmentFailed(f"{self.server} {what}{f' ({known})' if known else ''}")


class _SharedConnection:
    """The connection of a server that is shared: opened for the first rollouts, again where it was lost."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None

    async def acquire(self) -> _Connection:
        if self._loop is not asyncio.get_running_loop():  # what another one had, ended with it
            self._loop, self._opening = asyncio.get_running_loop(), SharedAttempt(self._open)
            self._connection: _Connection | None = None
        connection = self._connection
        if connection is None or not connection.is_usable:
            connection = await self._opening.result()
        connection.users += 1
        return connection

    async def _open(self) -> _Connection:
        self._connection = await _Connection.open(self._server)
        return self._connection

    async def release(self, connection: _Connection) -> None:
        """A lost one is closed with its last rollout."""
        connection.users -= 1
        if connection.users == 0 and not connection.is_usable:
            await connection.close()

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop() and self._connection is not None:
            await self._connection.close()


async def _note_refusal(response: httpx2.Response) -> None:
    refusals = _refusals.get()
    if refusals is not None and response.request.method == "POST" and response.is_error:
        refusals.append(response.status_code)


def _is_answer(error: MCPError, refusals: Sequence[int], *, has_sessions: bool) -> bool:
    """Whether a server by URL said so itself: the client makes errors of all that HTTP fails with, too."""
    from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR

    if error.code == INVALID_PARAMS:  # the client never says that, and servers do with status 400
        return True
    if refusals:  # so they do with these, where no session can have been lost; the client gives a 400 another code
        return not has_sessions and refusals[-1] == 400 and error.code in (INVALID_REQUEST, PARSE_ERROR)
    is_of_client = error.code in (CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR)
    return not (is_of_client and error.message.startswith(_CLIENT_SAYS))


def _said(error: BaseException) -> str:
    """The first of nested errors, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
