"""Alphabet-sort: a multi-turn task that a small model can learn in minutes.

    user       Sort these names alphabetically, one per line:   Max / Ada
    assistant  Ada / Max
    user       Merge these names into the sorted list. ...      Leo
    assistant  Ada / Leo (new) / Max

A turn's reward is the `difflib` ratio of the produced and the expected list of lines, to the fourth power; a rollout's
is the mean over its turns. What is expected depends only on what the user said: a wrong turn does not spoil the next.

A hash of the set of a conversation's names splits training and held-out tasks, so that they never share a combination.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Final

from tailrace.environments.generated import GeneratedRows
from tailrace.environments.protocol import EnvironmentSpec, Observation
from tailrace.environments.rows import Row
from tailrace.errors import SettingsError
from tailrace.records import Message, Task

_NAMES_TEXT: Final = """
Aaron Ada Alice Amy Anna Arthur Ben Bella Bruno Carl Clara Daisy David Diana Dylan Edgar Ella Emma Eric Eva Felix
Fiona Frank Gary Gina Grace Hanna Harry Hugo Ida Iris Ivan Jack Jane John Julia Karl Kate Kim Laura Leo Lily Luke
Maria Max Mia Nadia Nina Noah Olga Oscar Paul Piper Quinn Rosa Ruth Sam Sofia Tara Theo Tom Vera Will Zoe
"""
NAMES: Final = tuple(_NAMES_TEXT.split())
"""In plain ASCII with one capital each, so that the order of strings is the order of the alphabet."""
NEW_MARK: Final = " (new)"
_MOST_NAMES: Final = len(NAMES) // 2


def alphabet_sort(
    *,
    seed: int = 0,
    num_train_tasks: int = 10_000,
    eval_seed: int = 0,
    num_eval_tasks: int = 200,
    min_turns: int = 2,
    max_turns: int = 3,
    min_names: int = 2,
    max_names: int = 4,
    power: float = 4.0,
) -> EnvironmentSpec:
    """The environment: conversations of `min_turns` to `max_turns`, each turn with `min_names` to `max_names` names.

    A turn's reward is the `difflib` ratio to the `power`. Raises `SettingsError` where a range is empty, or too few
    names are left to hold combinations out.

    >>> spec = alphabet_sort(max_turns=2)
    >>> len(spec.eval_tasks), len(spec.train_tasks[0]["turns"])
    (200, 2)
    """
    if power <= 0:
        raise SettingsError(f"environment.args.power is {power}; a reward needs a power above 0")
    sizes = ConversationSizes(min_turns, max_turns, min_names, max_names)
    return EnvironmentSpec(
        name="alphabet-sort",
        description="Sort names, then merge more of them into the sorted list and mark the new ones.",
        train_tasks=alphabet_sort_tasks(sizes, held_out=False, seed=seed, length=num_train_tasks),
        eval_tasks=alphabet_sort_tasks(sizes, held_out=True, seed=eval_seed, length=num_eval_tasks),
        environment=partial(AlphabetSort, power),
        required_columns=("turns", "expected"),
        columns=("turn_rewards",),
        trusted=True,
    )


class AlphabetSort:
    """One conversation. Its reward is the mean over the turns, its column `turn_rewards` has each turn's."""

    def __init__(self, power: float = 4.0) -> None:
        self._power = power
        self._turns: list[list[str]] = []
        self._expected: list[list[str]] = []
        self.turn_rewards: list[float] = []

    def reset(self, task: Task) -> Observation:
        """Ask for the first names to be sorted."""
        self._turns, self._expected = task["turns"], task["expected"]
        return Observation.user(question(self._turns, 0))

    def step(self, reply: Message) -> Observation:
        """Score the reply and bring the next names, if any are left."""
        turn = len(self.turn_rewards)
        self.turn_rewards.append(turn_reward(reply["content"], self._expected[turn], self._power))
        reward = self.turn_rewards[-1] / len(self._turns)
        if turn + 1 < len(self._turns):
            return Observation.user(question(self._turns, turn + 1), reward=reward)
        right = sum(value == 1.0 for value in self.turn_rewards) / len(self._turns)
        return Observation.end(reward, metrics={"right_turns": right})


@dataclass(frozen=True, slots=True)
class ConversationSizes:
    """How many turns a conversation has and how many names a turn brings, both drawn evenly from a range."""

    min_turns: int = 2
    max_turns: int = 3
    min_names: int = 2
    max_names: int = 4

    def __post_init__(self) -> None:
        for what, low, high in (("turns", self.min_turns, self.max_turns), ("names", self.min_names, self.max_names)):
            if not 1 <= low <= high:
                raise SettingsError(
                    f"environment.args.min_{what} = {low} and max_{what} = {high}: expected 1 ≤ min_{what} ≤ max_{what}"
                )
        most = self.max_turns * self.max_names
        if most > _MOST_NAMES:
            raise SettingsError(
                f"environment.args: max_turns × max_names is {most}, at most {_MOST_NAMES} names fit in a conversation"
            )

    def draw(self, rng: random.Random) -> list[list[str]]:
        """The names that each turn of one conversation brings; no name comes twice."""
        num_turns = rng.randint(self.min_turns, self.max_turns)
        sizes = [rng.randint(self.min_names, self.max_names) for _ in range(num_turns)]
        names = iter(rng.sample(NAMES, sum(sizes)))
        return [list(itertools.islice(names, size)) for size in sizes]


def alphabet_sort_tasks(sizes: ConversationSizes, *, held_out: bool, seed: int, length: int) -> GeneratedRows:
    """Rows `{"turns": [[name]], "expected": [[line]]}`, each made when it is read, from the seed and its index.

    >>> tasks = alphabet_sort_tasks(ConversationSizes(), held_out=True, seed=0, length=200)
    >>> len(tasks), tasks[7] == tasks[7]
    (200, True)
    """

    def draw(rng: random.Random) -> Row:
        turns = sizes.draw(rng)
        return {"turns": turns, "expected": [expected_lines(turns, turn) for turn in range(len(turns))]}

    def is_eval(row: Row) -> bool:
        return is_combination_held_out(list(itertools.chain.from_iterable(row["turns"])))

    stream = f"{'held-out' if held_out else 'train'}/{seed}"
    return GeneratedRows(draw, is_eval=is_eval, seed=stream, size=length, held_out=held_out)


def is_combination_held_out(names: Sequence[str]) -> bool:
    """Whether this combination of names, in any order, belongs to the held-out tasks (one in eight does).

    >>> is_combination_held_out(["Ada", "Leo"]) == is_combination_held_out(["Leo", "Ada"])
    True
    """
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 8 == 0  # not as `is_held_out`: the bundled model was made with this split


def expected_lines(turns: Sequence[Sequence[str]], turn: int) -> list[str]:
    """The right answer to turn `turn` (from 0): all names so far, sorted; from the second turn on, its own are marked.

    >>> expected_lines([["Max", "Ada"], ["Leo"]], 1)
    ['Ada', 'Leo (new)', 'Max']
    """
    new = set(turns[turn]) if turn > 0 else set()
    names = sorted(itertools.chain.from_iterable(turns[: turn + 1]))
    return [name + NEW_MARK if name in new else name for name in names]


def question(turns: Sequence[Sequence[str]], turn: int) -> str:
    """What the user says in turn number `turn` (from 0)."""
    if turn == 0:
        say = "Sort these names alphabetically, one per line:"
    else:
        say = f"Merge these names into the sorted list. Mark only them with{NEW_MARK}:"
    return "\n".join([say, *turns[turn]])


def turn_reward(answer: str, expected: Sequence[str], power: float = 4.0) -> float:
    """The `difflib` ratio (0 to 1) of the answer's lines and the expected ones, to a power; empty lines don't count.

    >>> turn_reward("Ada\\nMax", ["Ada", "Max"]), turn_reward("Max\\nAda", ["Ada", "Max"])
    (1.0, 0.0625)
    """
    produced = [line.strip() for line in answer.splitlines() if line.strip()]
    return float(SequenceMatcher(None, produced, list(expected), autojunk=False).ratio() ** power)
