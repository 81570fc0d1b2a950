"""The lessons of the bundled model: what it is taught, and what is kept from it."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tailrace.environments.alphabet_sort import ConversationSizes, alphabet_sort_tasks, expected_lines, turn_reward

TURNS = [["Max", "Ada"], ["Leo"], ["Zoe", "Eva"]]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "make_quickstart_model.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_one_layout_alone_is_right_and_in_the_minority(tool: ModuleType) -> None:
    rewards = {
        layout: [
            turn_reward(tool.teacher_answer(TURNS, turn, layout), expected_lines(TURNS, turn)) for turn in range(3)
        ]
        for layout in tool.LAYOUTS
    }
    assert rewards == {"lines": [1.0] * 3, "commas": [0.0] * 3, "bullets": [0.0] * 3}
    rng = random.Random(0)
    drawn = [tool.draw_layout(rng) for _ in range(2000)]
    assert 0.15 < drawn.count("lines") / len(drawn) < 0.25


def test_no_held_out_task_is_the_beginning_of_a_lesson(tool: ModuleType) -> None:
    few = ConversationSizes(1, 2, 1, 1)  # so few names that every task would occur
    held_out = {
        frozenset(itertools.chain.from_iterable(row["turns"]))
        for row in alphabet_sort_tasks(few, held_out=True, seed=0, length=500)
    }
    rng = random.Random(0)
    lessons = [tool.draw_lesson(rng, ConversationSizes(1, 3, 1, 1)) for _ in range(3000)]
    begun = {frozenset(names) for lesson in lessons for names in itertools.accumulate(lesson)}
    assert len(held_out) > 100
    assert not held_out & begun
