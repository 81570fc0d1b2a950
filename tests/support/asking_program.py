"""A program that is an agent: asks the policy once, and behaves as its task says. Python's own modules do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def ask(word: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": word}]}
    answer = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    return answer["choices"][0]["message"]["content"]


def read_task() -> dict[str, str]:
    if "TAILRACE_TASK" in os.environ:
        return json.loads(os.environ["TAILRACE_TASK"])
    if "TAILRACE_TASK_FILE" in os.environ:
        with open(os.environ["TAILRACE_TASK_FILE"]) as file:
            return json.load(file)
    return json.load(sys.stdin)


def sleep_in_a_child(*, detached: bool) -> None:
    """A child that outlives this process; detached, as daemons are: a child of init's, in a session of its own."""
    code = "import time; time.sleep(600)"
    if detached:
        code = f"import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        {code}"
    subprocess.Popen([sys.executable, "-c", code], stdout=sys.stdout)
    time.sleep(0.2 if detached else 0)


def main() -> int:
    task = read_task()
    behave = task.get("behave", "well")
    if behave == "never ask":
        return 0
    said = ask(task["word"])
    with open("said.txt", "w") as file:
        file.write(said)
    match behave:
        case "exit":
            print("first line\nthe last line")
            return 3
        case "flood":
            while True:
                print("x" * 1000)
        case "hang":
            time.sleep(600)
        case "memory":
            taken = bytearray(os.urandom(1)) * 400_000_000
            time.sleep(600)
            print(len(taken))
        case "processes":
            children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(8)]
            time.sleep(600)
            print(len(children))
        case "leave a child":
            sleep_in_a_child(detached=False)
        case "leave a daemon":
            sleep_in_a_child(detached=True)
        case "leave a daemon and hang":
            sleep_in_a_child(detached=True)
            time.sleep(600)
        case "write":
            with open(task["file"], "w") as file:
                file.write(task["text"])
        case "post":
            post(f"{os.environ['TAILRACE_ROLLOUT_URL']}/reward", {"reward": 0.75})
    return 0


if __name__ == "__main__":
    sys.exit(main())
