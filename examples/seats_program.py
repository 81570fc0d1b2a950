"""A small agent with a tool, over OpenAI's API and nothing but Python's own modules: run by `own_program.py`."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

TOOL = {
    "name": "sits_by",
    "description": "Who sits beside somebody.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The next message of a conversation."""
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def main() -> None:
    """At most four turns: call the tool as often as needed, then answer without a call."""
    task = json.loads(os.environ["TAILRACE_TASK"])
    neighbours = dict(zip(task["table"], task["table"][1:] + task["table"][:1], strict=True))
    question = "Who sits beside them? One name per line:\n" + "\n".join(task["names"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(4):
        messages.append(reply := ask(messages))
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            name = json.loads(call["function"]["arguments"]).get("name")
            answer = neighbours.get(name, f"nobody is called {name}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})


if __name__ == "__main__":
    main()
