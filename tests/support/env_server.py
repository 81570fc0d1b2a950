"""Speaks as verifiers 0.4's environment server does, in place of an interpreter that has verifiers.

    env_server.py -P HOST describe ANSWER
    env_server.py -P HOST serve ADDRESS

What a rollout comes to is in its task: `do`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio


class Server:
    def __init__(self, address: str) -> None:
        self.socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        self.socket.bind(address)
        self.running: dict[str, asyncio.Task[None]] = {}
        self.cancelled = 0

    async def run(self) -> None:
        while True:
            client, request_id, method, data = await self.socket.recv_multipart()
            request = msgspec.msgpack.decode(data)
            if method == b"run":
                self.running[request_id.decode()] = asyncio.create_task(self.play(client, request_id, request))
                continue
            if method == b"cancel":
                self.cancelled += self.running[request["request_id"]].cancel()
            await self.send(client, request_id, b"reply", {"success": True})

    async def play(self, client: bytes, request_id: bytes, request: dict[str, Any]) -> None:
        task, trace = request["task_data"], {"trace": f"t{len(self.running)}"}
        await self.send(client, request_id, b"delta", {**trace, "open": {"version": 1}, "set": {"ok": False}})
        match task["do"]:
            case "die":
                print("no memory is left", flush=True)
                os._exit(3)
            case "wait":
                await asyncio.sleep(3600)
            case "refuse":
                await self.send(client, request_id, b"reply", {"success": False, "error": "ValueError: no such task"})
                return
        answer = await ask(request, trace["trace"])
        ok = task["do"] != "fail"
        scored = {"near": {"score": 0.5, "weight": 2.0}, "brief": {"score": 1.0, "weight": 0.0}}
        said = {
            "ok": ok,
            "stop_condition": "agent_completed" if ok else "task_error",
            "rewards": {"near": None} if task["do"] == "unscored" else scored,
            "metrics": {"turns": 1, "missed": None},
            "info": {"answer": answer["choices"][0]["token_ids"], "raw": b"abc", "cancelled": self.cancelled},
        }
        errors = [] if ok else [{"type": "TaskError", "message": "scoring: no judge", "traceback": "..."}]
        nodes = [{"mask": [], "token_ids": answer["choices"][0]["token_ids"]}]
        await self.send(client, request_id, b"delta", {**trace, "nodes": nodes, "calls": [{"node": 0}]})
        await self.send(client, request_id, b"delta", {**trace, "errors": errors, "set": said})
        length = {"id": trace["trace"], "nodes": 2 if task["do"] == "lose" else 1, "calls": 1}
        head = {"id": "e", "errors": [], "ok": ok}
        await self.send(
            client, request_id, b"reply", {"success": True, "error": None, "head": head, "traces": [length]}
        )

    async def send(self, client: bytes, request_id: bytes, kind: bytes, message: dict[str, Any]) -> None:
        await self.socket.send_multipart([client, request_id, kind, msgspec.msgpack.encode(message)])


async def ask(request: dict[str, Any], session: str) -> dict[str, Any]:
    """One turn, as verifiers' client for training asks for it."""
    client = request["client"]
    assert (client["type"], request["sampling"]) == ("train", {})
    assert (Path(client["renderer_model_name"]) / "tokenizer.json").exists()
    body = {
        "model": request["model"],
        "token_ids": request["task_data"]["prompt_ids"],
        "sampling_params": {"logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 0},
    }
    headers = {"authorization": "Bearer EMPTY", "X-Session-ID": session, **client["headers"]}
    url = client["base_url"].removesuffix("/v1") + "/inference/v1/generate"
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(url, json=body, headers=headers)
    answer.raise_for_status()
    return dict(answer.json())


def main(_safe: str, _host: str, action: str, where: str) -> None:
    request = json.load(sys.stdin)
    if action == "describe":
        tasks = request["env"]["taskset"]["tasks"]
        Path(where).write_text(json.dumps({"version": request["env"].get("version", "0.4.0"), "tasks": tasks}))
        return
    asyncio.run(Server(where).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
