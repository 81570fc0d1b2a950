"""Addresses of policies over the plainest HTTP server there can be: every POST is a turn, or a reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tailrace.environments import AgentResult, Policy


@dataclass
class PlainEndpoint:
    """Implements `Endpoint`."""

    root_url: str
    key: str = "rollout-key"
    reported: AgentResult | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def openai_url(self) -> str:
        return f"{self.root_url}/v1"

    @property
    def path_url(self) -> str:
        return f"{self.root_url}/rollouts/{self.key}"

    async def ended(self) -> None:
        await self._end.wait()


class PlainEndpoints:
    """Implements `Endpoints`."""

    @contextlib.asynccontextmanager
    async def open(self, policy: Policy) -> AsyncIterator[PlainEndpoint]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if "/reward" in head.split("\r\n")[0]:
                endpoint.reported = AgentResult(body["reward"])
                said = {}
            else:
                assert f"bearer {endpoint.key}" in head
                reply = await policy.chat(body["messages"])
                said = {"choices": [{"message": reply.message}]}
            answered = json.dumps(said).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answered) + answered
            )
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        endpoint = PlainEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            yield endpoint
