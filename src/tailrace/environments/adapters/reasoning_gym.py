"""reasoning-gym: about a hundred generated tasks (arithmetic, logic, games, code) with their own scoring.

    --environment.name reasoning-gym --environment.args.dataset basic_arithmetic --environment.args.max_digits 2
    --environment.name reasoning-gym --environment.args.dataset chain_sum --environment.args.levels '[0, 1, 2]'
    --environment.name reasoning-gym --environment.args.dataset composite
        --environment.args.datasets '[{"name": "chain_sum", "weight": 2, "config": {}}, ...]'

Every other argument goes to the data set's configuration. Needs `pip install "tailrace[reasoning-gym]"`.

Its scoring is untrusted: some data sets evaluate the answer as an expression, and `9**9**9` never returns.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, get_type_hints

from tailrace.environments.answers import extract_answer
from tailrace.environments.arguments import convert_argument, unknown_argument
from tailrace.environments.generated import is_held_out
from tailrace.environments.protocol import EnvironmentSpec
from tailrace.environments.results import AgentResult
from tailrace.environments.rows import Row, SplitRows
from tailrace.environments.single_turn import single_turn_agent
from tailrace.errors import SettingsError
from tailrace.extras import import_extra
from tailrace.near_names import did_you_mean
from tailrace.records import Json, Message, Task

_COMPOSITE = "composite"
_PROBES = 50
"""Questions that are looked at for one on the wanted side: one in four is held out."""

_import = partial(import_extra, extra="reasoning-gym", what="the environment reasoning-gym")


def reasoning_gym(
    *,
    dataset: str,
    levels: list[int] | None = None,
    system_prompt: str | None = "default",
    few_shot: Sequence[tuple[str, str]] = (),
    seed: int = 0,
    size: int = 10_000,
    eval_size: int = 200,
    **config: Json,
) -> EnvironmentSpec:
    """One data set of reasoning-gym, or several as its `composite`, which has a field `datasets`.

    `levels` are of the data set's own curriculum, for all of its attributes at once: the questions are an even mix of
    them. With either the score is reported by data set or level as well. `system_prompt` is the name of one of
    reasoning-gym's, a text of your own, or None; `few_shot` are questions and answers that stand before every question,
    of which a small model learns the form of an answer. `size` counts all questions that the data set generates,
    `eval_size` the held-out tasks, at most one for 50 of those; a question's text decides whether it is held out, so no
    seed brings one into training. `config` holds fields of the data set's own configuration.

    Raises `SettingsError` where reasoning-gym is not installed or has no such data set, field or level.
    """
    given = {**config, "seed": seed, "size": size}
    source = ReasoningGymDataset(dataset, given) if levels is None else ReasoningGymLevels(dataset, levels, given)
    source.open()
    prompts: dict[str, str] = _import("reasoning_gym.utils").SYSTEM_PROMPTS
    return EnvironmentSpec(
        name=f"reasoning-gym-{dataset}",
        description=f"The data set {dataset} of reasoning-gym, scored by it.",
        train_tasks=ReasoningGymRows(source, size=size, num_rows=size, held_out=False),
        eval_tasks=ReasoningGymRows(source, size=size, num_rows=min(eval_size, size // _PROBES), held_out=True),
        agent=single_turn_agent(
            prompt="question",
            system_prompt=None if system_prompt is None else prompts.get(system_prompt, system_prompt),
            few_shot=few_shot,
        ),
        reward=source.reward,
        required_columns=("question", "answer", "entry", "source_index"),
        trusted=False,
    )


class ReasoningGymDataset:
    """A data set whose configuration is checked at once and whose questions are generated when they are read."""

    num_levels = 1

    def __init__(self, name: str, config: Mapping[str, Json], *, level: int | None = None) -> None:
        self._name, self._level = name, level
        self._dataset_class, config_class = _find(name)
        base = None if level is None else _curriculum_config(name, level)
        self._config = _make_config(name, config_class, config, base)

    @cached_property
    def _dataset(self) -> Any:
        try:
            return self._dataset_class(config=self._config)
        except (AssertionError, TypeError, ValueError) as error:  # a composite makes its data sets only now
            raise _refused(self._name, error) from error

    def open(self) -> None:
        """Make the data set now. Raises `SettingsError` where a composite names what there is not."""
        if self._name == _COMPOSITE:
            _ = self._dataset

    def row(self, index: int) -> dict[str, Json]:
        """A question as a task row. `entry` is what scoring needs besides, exact, as a Python literal."""
        entry = self._dataset[index]
        rest = {key: value for key, value in entry.items() if key not in {"question", "answer"}}
        asked = {"question": entry["question"], "answer": entry["answer"]}
        return {**asked, "entry": _as_literal(rest), "source_index": index}

    def reward(self, task: Task, messages: list[Message]) -> AgentResult:
        """The data set's own score of the answer in the last reply."""
        answer, entry, dataset = extract_answer(messages[-1]["content"]), self._entry(task), self._dataset
        try:
            score = float(dataset.score_answer(answer=answer, entry=entry))
        except Exception:  # noqa: BLE001 - whatever a data set's scoring raises where it cannot read an answer
            return AgentResult(0.0, metrics={"unreadable": 1.0}, info={"extracted_answer": answer})
        part = {} if (name := self._part(task)) is None else {name: score}
        return AgentResult(score, metrics={"unreadable": 0.0, **part}, info={"extracted_answer": answer})

    def _part(self, task: Task) -> str | None:
        """What the score is also reported by."""
        if self._level is not None:
            return f"level_{self._level}"
        return str(self._entry(task)["metadata"]["source_dataset"]) if self._name == _COMPOSITE else None

    def _entry(self, task: Task) -> dict[str, Any]:
        if task["entry"] is None:
            regenerated: dict[str, Any] = self._dataset[task["source_index"]]
            return regenerated
        return {"question": task["question"], "answer": task["answer"], **ast.literal_eval(task["entry"])}


class ReasoningGymLevels:
    """A data set at several levels of its curriculum, in turn by the question's index."""

    def __init__(self, name: str, levels: Sequence[int], config: Mapping[str, Json]) -> None:
        if not levels or len(set(levels)) < len(levels):
            raise SettingsError(f"environment.args.levels = {list(levels)}: name one or more, each once")
        self._parts = [ReasoningGymDataset(name, config, level=level) for level in levels]
        self.num_levels = len(levels)

    def row(self, index: int) -> dict[str, Json]:
        """A question as a task row."""
        return self._parts[index % len(self._parts)].row(index)

    def reward(self, task: Task, messages: list[Message]) -> AgentResult:
        """The score of the answer in the last reply, by its level as well."""
        part = self._parts[int(task["source_index"]) % len(self._parts)]
        return part.reward(task, messages)

    def open(self) -> None:
        """There is nothing that could fail later."""


class ReasoningGymRows(SplitRows):
    """Training or held-out rows of a data set, probing its questions until one is on the wanted side.

    A held-out row looks at indices of its own alone, so that no two are the same entry, and at one level of them, which
    take turns.
    """

    def __init__(
        self, source: ReasoningGymDataset | ReasoningGymLevels, *, size: int, num_rows: int, held_out: bool
    ) -> None:
        self._source = source
        self.num_kinds = source.num_levels
        self._size = size
        self._num_rows = num_rows
        self._held_out = held_out

    def __len__(self) -> int:
        return self._num_rows

    def _row(self, position: int) -> Row:
        indices = self._held_out_indices(position) if self._held_out else self._training_indices(position)
        for index in indices:
            row = self._source.row(index)
            if is_held_out(row["question"]) == self._held_out:
                return row
        raise SettingsError(
            f"{len(indices)} questions held no {'held-out' if self._held_out else 'training'} one: environment.args "
            "leave too few different questions; raise environment.args.size or make the questions more varied"
        )

    def _training_indices(self, position: int) -> Sequence[int]:
        return [(position + probe) % self._size for probe in range(min(self._size, _PROBES))]

    def _held_out_indices(self, position: int) -> Sequence[int]:
        levels = self._source.num_levels
        blocks = -(-self._num_rows // levels)  # of one row for each level
        width = self._size // (blocks * levels) * levels
        block, level = divmod(position, levels)
        return range(block * width + level, (block + 1) * width, levels)


def _find(name: str) -> tuple[type, type]:
    datasets: dict[str, tuple[type, type]] = _import("reasoning_gym.factory").DATASETS
    if name in datasets:
        return datasets[name]
    hint = did_you_mean(name, datasets, cutoff=0.4)
    raise SettingsError(f"environment.args.dataset is {name!r}: reasoning-gym has no such data set{hint}")


def _make_config(name: str, config_class: type, config: Mapping[str, Json], base: Any = None) -> Any:
    """The configuration: what is given, over that of a curriculum where there is one."""
    known = [field.name for field in dataclasses.fields(config_class)]
    hints = get_type_hints(config_class)
    for argument in config:
        if argument not in known:
            raise unknown_argument(argument, known, owner=f"reasoning-gym's {name}")
    values = {key: convert_argument(key, value, hints[key], owner=name) for key, value in config.items()}
    made = config_class(**values) if base is None else dataclasses.replace(base, **values)
    try:
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, ValueError) as error:
        raise _refused(name, error) from error
    return made


def _refused(name: str, error: Exception) -> SettingsError:
    return SettingsError(f"environment.args: reasoning-gym's {name} refuses its configuration: {error}")


def _curriculum_config(name: str, level: int) -> Any:
    """What its curriculum configures at a level; an attribute with fewer levels is at its highest."""
    curricula: dict[str, Any] = _import("reasoning_gym.factory").CURRICULA
    if name not in curricula:
        raise SettingsError(f"environment.args.levels: reasoning-gym's {name} has no curriculum")
    curriculum = curricula[name]()
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not 0 <= level <= highest:
        raise SettingsError(f"environment.args.levels has {level}: the levels of {name} are 0 to {highest}")
    for attribute in curriculum.attributes.values():
        curriculum.set_attr_level(attribute.name, min(level, len(attribute.levels) - 1))
    return curriculum.generate_configuration()


def _as_literal(value: dict[str, Any]) -> str | None:
    """The value as a Python literal, which keeps tuples, sets and number keys; None where it has no literal."""
    literal = repr(value)
    try:
        return literal if ast.literal_eval(literal) == value else None
    except (ValueError, SyntaxError):
        return None
