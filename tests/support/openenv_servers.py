"""A server that speaks OpenEnv's protocol, with as many sessions, forms of actions and faults as a test asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

WORD = {"type": "object", "properties": {"word": {"type": "string"}, "metadata": {"type": "object"}}}
MOVE = {
    "title": "MoveAction",
    "description": "Move.",
    "type": "object",
    "properties": {"to": {"type": "integer"}, "why": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["to"],
}


@dataclass
class FakeServer:
    """Ends an episode with the word "stop"; rewards a word by its letters."""

    capacity: int = 8
    action: dict[str, Any] = field(default_factory=lambda: WORD)
    has_websocket: bool = True
    refuses_with: list[int] = field(default_factory=list)
    """HTTP statuses with which the next handshakes are refused."""
    fault: str = ""
    resets: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    open: int = 0
    most: int = 0
    url: str = ""

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.resets.append(data)
        return {"observation": {"text": "Say a word."}, "reward": None, "done": False}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        self.actions.append(action)
        said = action.get("word", str(action.get("to", "")))
        return {"observation": {"text": said.upper()}, "reward": len(said) / 10, "done": said == "stop"}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "reset":
            return {"type": "observation", "data": self.reset(message["data"])}
        if missing := [name for name in self.action.get("required", ["word"]) if name not in message["data"]]:
            return _error(f"{missing[0]} is missing", "VALIDATION_ERROR")
        if self.fault == "raises":
            return _error("division by zero", "EXECUTION_ERROR")
        return {"type": "observation", "data": self.step(message["data"])}

    async def converse(self, connection: WebSocket) -> None:
        if self.refuses_with:
            await connection.send_denial_response(Response(status_code=self.refuses_with.pop(0)))
            return
        await connection.accept()
        self.headers.append(connection.headers.get("authorization", ""))
        if self.open >= self.capacity:
            await connection.send_text(json.dumps(_error("1 of 1 sessions", "CAPACITY_REACHED")))
            await connection.close()
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while True:
                message = json.loads(await connection.receive_text())
                if self.fault == "garbage":
                    await connection.send_text("<html>")
                elif self.fault == "hangs" and message["type"] == "step":
                    await asyncio.Event().wait()
                elif self.fault == "leaves" and message["type"] == "step":
                    await connection.close()
                    return
                else:
                    await connection.send_text(json.dumps(self.answer(message)))
        except WebSocketDisconnect:
            pass
        finally:
            self.open -= 1

    def app(self) -> Starlette:
        async def schema(request: Request) -> JSONResponse:
            self.headers.append(request.headers.get("authorization", ""))
            return JSONResponse({"action": self.action, "observation": {}, "state": {}})

        async def reset(request: Request) -> JSONResponse:
            self.headers.append(request.headers.get("authorization", ""))
            return JSONResponse(self.reset(await request.json()))

        async def step(request: Request) -> JSONResponse:
            action = (await request.json())["action"]
            if "word" not in action:
                return JSONResponse({"detail": "word is missing"}, status_code=422)
            return JSONResponse(self.step(action))

        routes: list[Any] = [
            Route("/schema", schema),
            Route("/reset", reset, methods=["POST"]),
            Route("/step", step, methods=["POST"]),
        ]
        if self.has_websocket:
            routes.append(WebSocketRoute("/ws", self.converse))
        return Starlette(routes=routes)


@contextlib.asynccontextmanager
async def served(server: FakeServer) -> AsyncIterator[FakeServer]:
    """Serve it on a free port for as long as the context lasts; `url` says where."""
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(server.app(), log_level="critical", timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    serving = asyncio.create_task(running.serve(sockets=[listening]))
    try:
        yield server
    finally:
        running.should_exit = True
        await serving


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}
