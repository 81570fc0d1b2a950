"""A program that is an agent, and starts in a moment: asks the policy once, over a socket of its own."""

import json
import os
import socket


def main() -> None:
    address = os.environ["OPENAI_BASE_URL"].removeprefix("http://")
    host, _, path = address.partition("/")
    name, _, port = host.rpartition(":")
    task = json.loads(os.environ["TAILRACE_TASK"])
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["question"]}]}).encode()
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((name, int(port)), timeout=200) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer.decode())
    with open("said.txt", "w") as file:
        file.write(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
