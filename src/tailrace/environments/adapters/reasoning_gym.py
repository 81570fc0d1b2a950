"""reasoning-gym: about a hundred generated tasks (arithmetic, logic, games, code) with their own scoring.

    --environment.name reasoning-gym --environment.args.dataset basic_arithmetic --environment.args.max_digits 2

Every other argument goes to the data set's configuration. Needs `pip install "tailrace[reasoning-gym]"`.

Its scoring is untrusted: some data sets evaluate the answer as an expression, and `9**9**9` never returns.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any, get_type_hints

from tailrace.environments.answers import extract_answer
from tailrace.environments.arguments import convert_argument, unknown_argument
from tailrace.environments.generated import is_held_out
from tailrace.environments.protocol import EnvironmentSpec
from tailrace.environments.results import AgentResult
from tailrace.environments.rows import LazyRows, Row
from tailrace.environments.single_turn import single_turn_agent
from tailrace.errors import SettingsError
from tailrace.records import Json, Message, Task


def reasoning_gym(
    *,
    dataset: str,
    system_prompt: str | None = "default",
    seed: int = 0,
    size: int = 10_000,
    eval_size: int = 200,
    **config: Json,
) -> EnvironmentSpec:
    """One data set of reasoning-gym; a mix of several is several environments.

    `system_prompt` is the name of one of reasoning-gym's, a text of your own, or None. `size` counts all questions that
    the data set generates, `eval_size` the held-out tasks; a question's text decides whether it is held out, so no seed
    brings one into training. `config` holds fields of the data set's own configuration.

    Raises `SettingsError` where reasoning-gym is not installed or has no such data set or field.
    """
    source = ReasoningGymDataset(dataset, {**config, "seed": seed, "size": size})
    prompts: dict[str, str] = _import("reasoning_gym.utils").SYSTEM_PROMPTS
    return EnvironmentSpec(
        name=f"reasoning-gym-{dataset}",
        description=f"The data set {dataset} of reasoning-gym, scored by it.",
        train_tasks=ReasoningGymRows(source, size=size, num_rows=size, held_out=False),
        eval_tasks=ReasoningGymRows(source, size=size, num_rows=min(eval_size, size), held_out=True),
        agent=single_turn_agent(
            prompt="question",
            system_prompt=None if system_prompt is None else prompts.get(system_prompt, system_prompt),
        ),
        reward=source.reward,
        required_columns=("question", "answer", "entry", "source_index"),
        trusted=False,
    )


class ReasoningGymDataset:
    """A data set whose configuration is checked at once and whose questions are generated when they are read."""

    def __init__(self, name: str, config: Mapping[str, Json]) -> None:
        self._name = name
        self._dataset_class, config_class = _find(name)
        self._config = _make_config(name, config_class, config)

    @cached_property
    def _dataset(self) -> Any:
        return self._dataset_class(config=self._config)

    def row(self, index: int) -> dict[str, Json]:
        """A question as a task row. `entry` is what scoring needs besides, exact, as a Python literal."""
        entry = self._dataset[index]
        rest = {key: value for key, value in entry.items() if key not in {"question", "answer"}}
        asked = {"question": entry["question"], "answer": entry["answer"]}
        return {**asked, "entry": _as_literal(rest), "source_index": index}

    def reward(self, task: Task, messages: list[Message]) -> AgentResult:
        """The data set's own score of the answer in the last reply."""
        answer = extract_answer(messages[-1]["content"])
        try:
            score = float(self._dataset.score_answer(answer=answer, entry=self._entry(task)))
        except ValueError:  # prime_factorization raises where the answer is no number: a wrong answer, not a failure
            return AgentResult(0.0, metrics={"unreadable": 1.0}, info={"extracted_answer": answer})
        return AgentResult(score, metrics={"unreadable": 0.0}, info={"extracted_answer": answer})

    def _entry(self, task: Task) -> dict[str, Any]:
        if task["entry"] is None:
            regenerated: dict[str, Any] = self._dataset[task["source_index"]]
            return regenerated
        return {"question": task["question"], "answer": task["answer"], **ast.literal_eval(task["entry"])}


class ReasoningGymRows(LazyRows):
    """Training or held-out rows of a data set, probing its questions until one is on the wanted side.

    Held-out row i looks only at its own stripe of indices, so that no two are the same entry.
    """

    def __init__(self, source: ReasoningGymDataset, *, size: int, num_rows: int, held_out: bool) -> None:
        self._source = source
        self._size = size
        self._num_rows = num_rows
        self._held_out = held_out

    def __len__(self) -> int:
        return self._num_rows

    def _row(self, position: int) -> Row:
        stripe = self._size // self._num_rows
        probes = min(self._size, max(stripe, 50))
        for probe in range(probes):
            row = self._source.row((position * stripe + probe) % self._size)
            if is_held_out(row["question"]) == self._held_out:
                return row
        raise SettingsError(
            f"{probes} questions held no {'held-out' if self._held_out else 'training'} one: environment.args leave "
            "too few different questions; raise environment.args.size or make the questions more varied"
        )


def _find(name: str) -> tuple[type, type]:
    datasets: dict[str, tuple[type, type]] = _import("reasoning_gym.factory").DATASETS
    if name in datasets:
        return datasets[name]
    close = get_close_matches(name, datasets, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise SettingsError(f"environment.args.dataset is {name!r}: reasoning-gym has no such data set{hint}")


def _make_config(name: str, config_class: type, config: Mapping[str, Json]) -> Any:
    known = [field.name for field in dataclasses.fields(config_class)]
    hints = get_type_hints(config_class)
    for argument in config:
        if argument not in known:
            raise unknown_argument(argument, known, owner=f"reasoning-gym's {name}")
    values = {key: convert_argument(key, value, hints[key], owner=name) for key, value in config.items()}
    made = config_class(**values)
    try:
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, ValueError) as error:
        raise SettingsError(f"environment.args: reasoning-gym's {name} refuses its configuration: {error}") from error
    return made


def _as_literal(value: dict[str, Any]) -> str | None:
    """The value as a Python literal, which keeps tuples, sets and number keys; None where it has no literal."""
    literal = repr(value)
    try:
        return literal if ast.literal_eval(literal) == value else None
    except (ValueError, SyntaxError):
        return None


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SettingsError(
            'the environment reasoning-gym needs a package: pip install "tailrace[reasoning-gym]"'
        ) from error
