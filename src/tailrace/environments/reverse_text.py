"""reverse-text: write a short text backwards. One turn, a graded reward; a small model learns it from scratch.

user       Reverse this text: a red boat
assistant  taob der a
"""

from __future__ import annotations

import random
from typing import Final

from tailrace.environments.answers import text_similarity
from tailrace.environments.generated import generated_environment
from tailrace.environments.protocol import EnvironmentSpec
from tailrace.environments.results import AgentResult
from tailrace.errors import SettingsError
from tailrace.records import Message, Task

_WORDS: Final = (
    "apple autumn bird blue boat book bread bridge bright candle cat cloud cold corn dark deer dog dream drum "
    "earth east eight fern field fire fish five flower forest fox four garden glass gold grain green harbor hill "
    "honey horse house island ivory jacket kite lake lamp leaf lemon light lily maple market mill moon morning "
    "mountain music night nine north ocean old one owl paper path pear pine quiet rain red river road rose sail "
    "salt sand sea seven silver six sky small snow song south star stone storm summer sun swan table ten three "
    "tower tree two valley velvet violet water west wheat white wind winter wolf wood yellow young"
)
WORDS: Final = tuple(_WORDS.split())


def reverse_text(
    *, min_words: int = 1, max_words: int = 4, seed: int = 0, size: int = 100_000, eval_size: int = 200
) -> EnvironmentSpec:
    """The environment; texts have `min_words` to `max_words` words. Raises `SettingsError` for an empty range."""
    if not 1 <= min_words <= max_words:
        raise SettingsError(f"environment.args: min_words = {min_words} must be from 1 to max_words = {max_words}")

    def draw(rng: random.Random) -> dict[str, str]:
        text = " ".join(rng.choices(WORDS, k=rng.randint(min_words, max_words)))
        return {"text": text, "prompt": f"Reverse this text: {text}", "answer": text[::-1]}

    return generated_environment(
        "reverse-text",
        draw,
        question="text",
        seed=seed,
        size=size,
        eval_size=eval_size,
        description="Write a short text backwards; reward: difflib ratio.",
        reward=similarity_reward,
    )


def similarity_reward(task: Task, messages: list[Message]) -> AgentResult:
    """How much of the answer the last reply has, from 0 to 1."""
    value = text_similarity(messages[-1]["content"].strip(), task["answer"])
    return AgentResult(value, metrics={"exact": float(value == 1.0)})
