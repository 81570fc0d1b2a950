"""An MCP server as a child process: the transport below `mcp.Client`, with limits and a certain end.

The package's own `stdio_client` has no limit on what a server writes, and a cancelled task can leave its server alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from types import TracebackType

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from tailrace.child_processes import describe_exit, kill_group
from tailrace.environments.adapters.servers import ErrorOutput
from tailrace.timeouts import timeout

MAX_LINE_BYTES = 16 << 20
"""Of one message of a server."""
MAX_GARBAGE_LINES = 1_000
"""That are no message, and skipped; a server that writes more of them is ended."""
CLOSE_S = 1.0
"""That a server has to end by itself once its input is closed; then its process group is killed."""
_READ_OUT_S = 5.0
"""For what a killed server had written; another process may hold its pipes for ever."""
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")

_Received = SessionMessage | Exception


class StdioTransport:
    """Starts the command, and passes messages as lines of JSON. A `Transport` of the package `mcp`."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None) -> None:
        self._command, self._cwd = list(command), cwd
        self._env = {**server_environment(), **env}
        self._process: Process | None = None
        self._trouble = ""
        self._output = ErrorOutput()
        self.is_open = True
        """Until its output ends."""

    def describe(self) -> str:
        """What is known of the process, to end a sentence with; empty where nothing is."""
        process, said = self._process, self._output.said
        ended = "" if process is None or process.returncode is None else f"it ended {describe_exit(process.returncode)}"
        parts = [self._trouble, ended, f"it wrote: {said}" if said else ""]
        return "; ".join(filter(None, parts))

    async def __aenter__(
        self,
    ) -> tuple[MemoryObjectReceiveStream[_Received], MemoryObjectSendStream[SessionMessage]]:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._env,
            cwd=self._cwd,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        self._to_client, received = anyio.create_memory_object_stream[_Received](0)
        sent, self._from_client = anyio.create_memory_object_stream[SessionMessage](0)
        self._passing = [asyncio.create_task(self._read(process)), asyncio.create_task(self._write(process))]
        self._listening = asyncio.create_task(self._output.listen(process))
        return received, sent

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None  # it was entered
        assert process.stdin is not None  # it has pipes
        try:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with timeout(CLOSE_S):
                    await process.wait()
        finally:
            kill_group(process.pid)
            for task in self._passing:
                task.cancel()
        await asyncio.wait(self._passing)
        await self._read_out(process)

    async def said_all(self) -> None:
        """Wait until what it wrote before its end has been read; it has ended, or its output has."""
        await asyncio.wait({self._listening}, timeout=CLOSE_S)

    async def _read_out(self, process: Process) -> None:
        """Read what is left: pipes, and the process with them, are closed by the loop where their end was read."""
        assert process.stdout is not None  # it has pipes
        with contextlib.suppress(TimeoutError):
            async with timeout(_READ_OUT_S):
                while await process.stdout.read(1 << 16):
                    pass
                await process.wait()
                await self._listening
        self._listening.cancel()

    async def _read(self, process: Process) -> None:
        """Pass its messages on. Its end, or output that is no message, ends the stream, and calls with it."""
        assert process.stdout is not None  # it has pipes
        garbage = 0
        async with self._to_client:
            try:
                while line := await process.stdout.readline():
                    try:
                        message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:  # a server that logs to its output
                        garbage += bool(line.strip())
                        self._trouble = f"a line of its output is no message: {line[:80]!r}"
                        if garbage > MAX_GARBAGE_LINES:
                            return
                        continue
                    await self._to_client.send(SessionMessage(message))
            except ValueError:
                self._trouble = f"a line of its output is longer than {MAX_LINE_BYTES} bytes"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # the client has left
            finally:
                self.is_open = False

    async def _write(self, process: Process) -> None:
        assert process.stdin is not None  # it has pipes
        async with self._from_client:
            with contextlib.suppress(ConnectionError):  # it has ended, which its output tells
                async for message in self._from_client:
                    line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()


def server_environment() -> dict[str, str]:
    """Variables that a server inherits: none that may be secret. Commands beside this Python are found first."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**kept, "PATH": os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", os.defpath)])}
