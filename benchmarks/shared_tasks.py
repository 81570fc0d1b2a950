"""Tasks and rewards that Tailrace and its peer share. Standard library only: it is imported in both environments."""

from __future__ import annotations

import json
import random
import zlib
from difflib import SequenceMatcher
from itertools import count, islice
from pathlib import Path

WORDS = [
    "apple",
    "autumn",
    "bird",
    "blue",
    "boat",
    "book",
    "bread",
    "bridge",
    "bright",
    "candle",
    "cat",
    "cloud",
    "cold",
    "corn",
    "dark",
    "deer",
    "dog",
    "dream",
    "drum",
    "earth",
    "east",
    "eight",
    "fern",
    "field",
    "fire",
    "fish",
    "five",
    "flower",
    "forest",
    "fox",
    "four",
    "garden",
    "glass",
    "gold",
    "grain",
    "green",
    "harbor",
    "hill",
    "honey",
    "horse",
    "house",
    "island",
    "ivory",
    "jacket",
    "kite",
    "lake",
    "lamp",
    "leaf",
    "lemon",
    "light",
    "lily",
    "maple",
    "market",
    "mill",
    "moon",
    "morning",
    "mountain",
]

COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def length_reward(completion: str, answer: str) -> float:
    """Costs next to nothing, and differs between completions."""
    return len(completion) % 17 / 16


def reverse_reward(completion: str, answer: str) -> float:
    """How much of the answer the completion is."""
    return SequenceMatcher(None, completion.strip(), answer).ratio()


REWARDS = {"length": length_reward, "reverse": reverse_reward}


def speed_tasks(size: int) -> list[dict[str, str]]:
    """Prompts of a few tokens."""
    return [{"prompt": " ".join(COUNTS[int(digit)] for digit in f"{index:04d}"), "answer": ""} for index in range(size)]


def reverse_tasks(size: int, seed: int, *, held_out: bool) -> list[dict[str, str]]:
    """Short texts to write backwards: of the fifth that is held out, or of the others."""
    rng = random.Random(seed)
    drawn = (" ".join(rng.choices(WORDS, k=rng.randint(1, 2))) for _ in count())
    texts = islice((text for text in drawn if is_held_out(text) is held_out), size)
    return [{"prompt": f"Reverse this text: {text}", "answer": text[::-1]} for text in texts]


def is_held_out(text: str) -> bool:
    """Whether a text is for measuring alone; decided by the text, so that no lesson can have it."""
    return zlib.crc32(text.encode()) % 5 == 0


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, str]]:
    """What `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]
