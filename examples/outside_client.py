"""An agent elsewhere: claims rollouts of a run over HTTP, plays them and says what they earned. See `own_outside.py`.

    python examples/outside_client.py runs/outside/gateway.json

Python's own modules are all that it needs: it may run on any machine that reaches the run's gateway.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

AT_ONCE = 32


def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """What the gateway answers; None where it has nothing to say."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        answer: dict[str, Any] | None = None if response.status == 204 else json.load(response)
    return answer


def play(rollout: dict[str, Any]) -> float:
    """One turn; the nearer to the sorted list, the better."""
    names = rollout["task"]["names"]
    question = "Sort these names alphabetically, one per line:\n" + "\n".join(names)
    body = {"model": "policy", "messages": [{"role": "user", "content": question}]}
    answer = post(f"{rollout['openai_base_url']}/chat/completions", rollout["key"], body) or {}
    said = answer["choices"][0]["message"]["content"].splitlines()
    return SequenceMatcher(None, said, sorted(names)).ratio() ** 4


def claim_and_play(run: dict[str, str]) -> None:
    """One rollout after another, until the run is over."""
    while True:
        try:
            rollout = post(f"{run['url']}/rollouts", run["key"], {"wait_s": 20})
        except (urllib.error.URLError, ConnectionError):
            return
        if rollout is None:
            continue
        try:
            post(f"{rollout['rollout_url']}/reward", rollout["key"], {"reward": play(rollout)})
        except urllib.error.HTTPError as error:
            print(f"{rollout['task_id']}: {error}")  # cancelled, or over its limits: the run goes on
        except (urllib.error.URLError, ConnectionError):
            return


def main(gateway_file: Path) -> None:
    """Wait for the run to begin, then play as many of its rollouts at once as there are threads."""
    while not gateway_file.exists():
        time.sleep(0.2)
    run = json.loads(gateway_file.read_text())
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(claim_and_play, [run] * AT_ONCE))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
