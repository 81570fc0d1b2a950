"""MCP servers that misbehave, in the standard library alone: `python mcp_servers.py MODE`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, __file__]
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


def say(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def content(mode: str, word: str) -> dict[str, Any]:
    if mode == "image":
        return {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    if mode == "long":
        return {"content": [{"type": "text", "text": word * 1000}]}
    if mode == "refuses":
        return {"content": [{"type": "text", "text": f"{word} is no word"}], "isError": True}
    if mode == "structured":
        return {"content": [], "structuredContent": {"word": word}}
    if mode == "env":
        return {"content": [{"type": "text", "text": os.environ[word]}]}
    if mode == "pid":
        return {"content": [{"type": "text", "text": str(os.getpid())}]}
    return {"content": [{"type": "text", "text": word.upper()}]}


def call(mode: str, number: int, word: str) -> None:
    if mode == "crashes":
        print("the disk is full", file=sys.stderr, flush=True)
        os._exit(7)
    if mode == "hangs" or (mode == "hangs-once" and not Path("hung").exists()):
        if mode == "hangs-once":
            Path("hung").touch()
        time.sleep(600)
    if mode == "hangs-at-times" and word == "hang":
        return
    if mode == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    if mode == "nonsense":
        say({"id": number, "result": {"content": "nothing"}})
    elif mode == "protocol-error" or word == "err":
        say({"id": number, "error": {"code": -32602, "message": "no such word"}})
    else:
        say({"id": number, "result": content(mode, word)})


def start(mode: str) -> None:
    if mode == "waits-to-start":
        Path("begun").touch()
        while not Path("may-start").exists():
            time.sleep(0.01)
    if mode == "leaves-a-trace":
        Path(f"started-{os.getpid()}").touch()
    if mode in ("never-starts", "leaves-a-trace"):
        print("no licence", file=sys.stderr, flush=True)
        sys.exit(3)
    if mode == "killed-at-start":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("silent", "stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if mode == "garbage":
        while True:
            print("INFO nothing to see here")


def main(mode: str) -> None:
    start(mode)
    for line in sys.stdin:
        asked = json.loads(line)
        method, number = asked["method"], asked.get("id")
        if mode == "talkative":
            print(f"DEBUG {method}", flush=True)
        if method == "initialize":
            result = {"capabilities": {"tools": {}}, "serverInfo": {"name": "small", "version": "1"}}
            say({"id": number, "result": {**result, "protocolVersion": asked["params"]["protocolVersion"]}})
        elif method == "tools/list":
            tools = [{"name": name, "description": "Shout.", "inputSchema": SCHEMA} for name in ("shout", "whisper")]
            say({"id": number, "result": {"tools": [] if mode == "no-tools" else tools}})
        elif method == "tools/call":
            call(mode, number, asked["params"]["arguments"]["word"])
        elif number is not None:
            say({"id": number, "error": {"code": -32601, "message": "not known"}})


if __name__ == "__main__":
    main(sys.argv[1])
