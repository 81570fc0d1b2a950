"""An OpenAI-compatible endpoint on a local port, which answers as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tailrace.records import Json


@dataclass(frozen=True)
class Answer:
    """One HTTP response; `content` makes it a chat completion, `body` is sent as it is."""

    content: str | None = None
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    closes: bool = False

    def payload(self) -> bytes:
        if self.content is None:
            return self.body
        message = {"role": "assistant", "content": self.content}
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        return json.dumps({"id": "1", "choices": [{"index": 0, "message": message}], "usage": usage}).encode()


def verdict(scores: dict[str, Any]) -> Answer:
    """The usual answer with these scores by id, in this order."""
    return Answer(json.dumps({"scores": [{"id": name, "score": score} for name, score in scores.items()]}))


@dataclass
class Endpoint:
    """What was asked, and what is answered: the answers in order, the last one again when they are used up."""

    answer: Callable[[Json, int], Answer]
    url: str = ""
    asked: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    paths: Sequence[str] = ("/v1/chat/completions",)
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert head[0].split()[:2] in [["POST", path] for path in self.paths]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        request = json.loads(await reader.readexactly(int(headers["content-length"])))
        number = len(self.asked)
        self.asked.append(request)
        self.headers.append(headers)
        answer = self.answer(request, number)
        if answer.hangs:
            await reader.read()  # until the client gives up
            return False
        if answer.closes:
            return False
        payload = answer.payload()
        told = {"content-length": str(len(payload)), "content-type": "application/json", **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} Told", *(f"{name}: {value}" for name, value in told.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        await writer.drain()
        return True


@asynccontextmanager
async def endpoint(
    *answers: Answer | Callable[[Json], Answer], paths: Sequence[str] = ("/v1/chat/completions",)
) -> AsyncIterator[Endpoint]:
    """Serves for as long as the block runs. An answer may be a function of the request's body."""

    def choose(request: Json, number: int) -> Answer:
        chosen = answers[min(number, len(answers) - 1)]
        return chosen if isinstance(chosen, Answer) else chosen(request)

    serving = Endpoint(choose, paths=paths)
    server = await asyncio.start_server(serving.serve, "127.0.0.1", 0)
    serving.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield serving
    finally:
        server.close()
        for writer in serving.open:  # from Python 3.12 on it waits for clients that stay
            writer.close()
        await server.wait_closed()
