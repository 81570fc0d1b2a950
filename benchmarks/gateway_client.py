"""The clients of `benchmarks/gateway.py`, in a process of their own: HTTP written by hand, so that they keep up.

Reads a JSON line (address, keys, turns, whether replies are streamed, seed), plays one rollout per key, all at once,
and prints a JSON line: how many turns there were, how long they took, and how many tokens whole answers had. Where it
`claims` them, the key is the run's: each client claims a rollout with it, plays it where it is told to, and says that
it earned 1.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvloop


class Rollout:
    """One conversation over one connection."""

    def __init__(self, order: dict[str, Any], key: str, number: int) -> None:
        self._order, self._key, self._random = order, key, random.Random(order["seed"] + number)
        self.turn_s: list[float] = []
        self.tokens = 0
        """Of answers that were not streamed."""

    async def play(self) -> None:
        await asyncio.sleep(self._random.random() * self._order["spread_s"])
        await self._connect(self._order["port"])
        if self._order["claims"]:
            claimed = await self._post("/rollouts", {"wait_s": 60})
            self._writer.close()
            self._key = claimed["key"]
            await self._connect(int(claimed["anthropic_base_url"].rpartition(":")[2]))
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Sort these names: {self._key[:12]}"}]
        for _ in range(self._order["turns"]):
            began_s = time.perf_counter()
            reply = await self._ask(messages)
            self.turn_s.append(time.perf_counter() - began_s)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And now?"}]
        if self._order["claims"]:
            await self._post(f"/rollouts/{self._key}/reward", {"reward": 1.0})
        self._writer.close()

    async def _connect(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)

    async def _ask(self, messages: list[dict[str, Any]]) -> str:
        tokens = self._order["tokens"]
        body = {
            "model": "policy",
            "messages": messages,
            "max_tokens": self._random.randint(tokens // 2, tokens * 3 // 2),
        }
        if self._order["streams"]:
            body["stream"] = True
            await self._send("/v1/chat/completions", body)
            return await self._stream()
        answer = await self._post("/v1/chat/completions", body)
        self.tokens += answer["usage"]["completion_tokens"]
        return str(answer["choices"][0]["message"]["content"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        top = await self._send(path, body)
        length = int(top.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return json.loads(await self._reader.readexactly(length))

    async def _send(self, path: str, body: dict[str, Any]) -> bytes:
        """Its request; the head of what is answered."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        self._writer.write(head.encode() + raw)
        top = await self._reader.readuntil(b"\r\n\r\n")
        if not top.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(top.decode())
        return top

    async def _stream(self) -> str:
        body = bytearray()
        while size := int(await self._reader.readline(), 16):
            body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        events = [event for event in body.split(b"\n\n") if event.startswith(b"data: {")]
        deltas = [json.loads(event[6:])["choices"][0]["delta"].get("content") or "" for event in events]
        return "".join(deltas)


async def main() -> None:
    order = json.loads(sys.stdin.readline())
    rollouts = [Rollout(order, key, number) for number, key in enumerate(order["keys"])]
    await asyncio.gather(*(rollout.play() for rollout in rollouts))
    turns = sorted(one for rollout in rollouts for one in rollout.turn_s)
    tokens = sum(rollout.tokens for rollout in rollouts)
    print(json.dumps({"turns": len(turns), "median_s": turns[len(turns) // 2], "tokens": tokens}))


if __name__ == "__main__":
    uvloop.run(main())
