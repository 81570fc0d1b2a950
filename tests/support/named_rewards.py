"""Reward functions in TRL's form, well-behaved and not, that worker processes load by name."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping
from typing import Any

from tailrace.environments import EnvironmentSpec, NamedReward, Policy
from tailrace.environments.named_rewards import TrainerState
from tailrace.records import Json, Task

Conversations = list[list[dict[str, Any]]]
ROWS: list[Mapping[str, Json]] = [
    {"word": word, "prompt": "not a column"} for word in ("fine", "hang", "raise", "hold", "nan", "short", "none")
]


async def echo(task: Task, policy: Policy) -> None:
    await policy.chat([{"role": "user", "content": task["word"]}])


def right(prompts: Conversations, completions: Conversations, word: list[str], **columns: list[Json]) -> list[float]:
    assert "prompt" not in columns
    assert [prompt[-1]["content"] for prompt in prompts] == word
    return [float(completion[-1]["content"] == "yes") for completion in completions]


def no_keywords(prompts: Conversations, completions: Conversations) -> list[float | None]:
    """Takes no columns at all, and applies to some."""
    return [0.5 if prompt[0]["content"] == "fine" else None for prompt in prompts]


async def slow(completions: Conversations, **_: object) -> list[float]:
    await asyncio.sleep(0.01)
    return [0.25 for _ in completions]


def length(completions: Conversations, **_: object) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]


def longest(completions: Conversations, word: list[str], **_: object) -> list[float | None]:
    """Compares the rollouts of a group; does not apply to empty replies."""
    assert len(set(word)) == 1
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [None if not length else float(length == max(lengths)) for length in lengths]


def where(completions: Conversations, **_: object) -> list[float]:
    return [float(os.getpid()) for _ in completions]


def troubled(completions: Conversations, word: list[str], **_: object) -> list[float] | float:
    match word[0]:
        case "hang":
            while True:
                pass
        case "hold":  # the interpreter lock, as a checker of mathematics may, in one call into C
            hashlib.pbkdf2_hmac("sha256", b"proof", b"salt", 4_000_000)
            time.sleep(0.01)
        case "raise":
            raise ZeroDivisionError("of the user")
        case "nan":
            return [float("nan")]
        case "short":
            return []
        case "none":
            return 1.0
    return [1.0 for _ in completions]


def tokens(completion_ids: list[list[int]], trainer_state: TrainerState, **_: object) -> list[float]:
    """What TRL passes besides, in one number: thousands of tokens, steps, and the first token in hundredths."""
    steps = trainer_state.max_steps + trainer_state.global_step
    return [1000 * len(ids) + steps + ids[0] / 100 for ids in completion_ids]


def ids_alone(prompts: Conversations, completions: Conversations, completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def named() -> EnvironmentSpec:
    rewards = {
        "right": NamedReward(right),  # type: ignore[arg-type]
        "fine": NamedReward(no_keywords, 0.1),
        "slow": NamedReward(slow, 2.0),  # type: ignore[arg-type]
    }
    return EnvironmentSpec(name="named", agent=echo, rewards=rewards, train_tasks=ROWS)


def plain() -> EnvironmentSpec:
    return EnvironmentSpec(name="plain", agent=echo, train_tasks=ROWS)


def inapplicable(completions: Conversations, **_: object) -> list[float | None]:
    return [None for _ in completions]
