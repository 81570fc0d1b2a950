"""Training and measuring from a program: what the command `tailrace` does, as functions. See docs/python.md."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from datetime import time as clock_time
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from pydantic import BaseModel

from tailrace.config import RUNS, RunSettings, load_from_python, placed_at
from tailrace.environments import EnvironmentSpec
from tailrace.environments.registry import OF_THE_PROGRAM
from tailrace.errors import DataError, LifecycleError, SettingsError
from tailrace.lifecycle.event_loop import run_on_event_loop
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.records import RunStatus
from tailrace.reporting.logs import logging_as_it_was
from tailrace.reporting.sinks import read_jsonl
from tailrace.reporting.summary import RunSummary
from tailrace.run import evaluating, training
from tailrace.run.callbacks import Callbacks, OnMetrics
from tailrace.run.evaluating import EnvironmentEvaluation

_LEAVES: Final = str | bool | int | float | date | clock_time | None
"""What a setting may be beside a table and a list; what None stands for is told with its setting."""
Settings: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | RunSettings
"""A packaged recipe's name, a .toml file, or the same in tables.

In place of an environment's name may stand the environment: an `EnvironmentSpec`, a function that returns one, an
`async def agent(task, policy)`, or a class with reset and step.
"""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run went."""

    summary: RunSummary
    """What `summary.json` says."""
    folder: Path
    """The run's, with metrics, rollouts, checkpoints, logs and the report."""

    @property
    def status(self) -> RunStatus:
        """`finished`, `failed` or `cancelled`; `summary.reason` says why."""
        return self.summary.status

    @property
    def checkpoint(self) -> Path | None:
        """The newest one, a model in Hugging Face layout; None where none was written."""
        return Path(self.summary.checkpoint_path) if self.summary.checkpoint_path else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: one a step, and one for each evaluation beside training."""
        return [*read_jsonl(self.folder / "metrics.jsonl")]


async def train_async(
    settings: Settings,
    changes: Mapping[str, Any] | None = None,
    *,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    runs: str | os.PathLike[str] = "runs",
) -> RunResult:
    """`train`, from an async function or a notebook: `result = await tailrace.train_async(...)`."""
    for name, callback in (("on_step", on_step), ("on_evaluation", on_evaluation)):
        if callback is not None and not callable(callback):
            raise SettingsError(f"{name} is {callback!r:.80}; expected a function of one StepMetrics")
    given = _Given(settings, changes, _path(runs))
    with logging_as_it_was(), placed_at(given.places):
        summary = await training.train(
            given.settings,
            _path(runs),
            recipe=given.places.file,
            given=given.objects,
            callbacks=Callbacks(on_step, on_evaluation),
            abort=_interrupt,
        )
    return RunResult(summary, _path(runs) / given.settings.name)


def train(
    settings: Settings,
    changes: Mapping[str, Any] | None = None,
    *,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    runs: str | os.PathLike[str] = "runs",
) -> RunResult:
    """Train, and return how it went: also where the run failed or was interrupted, once it was started.

    Args:
        settings: A recipe, a .toml file, or tables of settings; see `Settings`.
        changes: Laid over them, by dotted name or in tables: `{"max_steps": 20, "trainer.learning_rate": 1e-4}`. An
            object of settings stands for the table of what was set in it.
        on_step: Called with the `StepMetrics` of every step, in order; what returns True ends the run, with a last
            save. The run goes on meanwhile.
        on_evaluation: The same for evaluations beside training.
        runs: The folder that the run's folder is made in.

    Raises:
        TailraceError: What the command ends with status 2 for: `SettingsError`, `DataError`, `ModelError`; and
            `LifecycleError` where an event loop runs already (write `await tailrace.train_async(...)` there).
        Exception, SystemExit: What a callback raised, after the run has ended in order.
    """
    _require_no_loop("train")
    return run_on_event_loop(train_async(settings, changes, on_step=on_step, on_evaluation=on_evaluation, runs=runs))


async def evaluate_async(
    settings: Settings,
    changes: Mapping[str, Any] | None = None,
    *,
    limit: int | None = None,
    greedy: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> dict[str, EnvironmentEvaluation]:
    """`evaluate`, from an async function or a notebook: `found = await tailrace.evaluate_async(...)`."""
    if limit is not None and not (type(limit) is int and limit >= 1):
        raise SettingsError(f"limit is {limit!r:.80}; it counts held-out tasks, so it must be a whole number from 1 on")
    file = None if save is None else _path(save)
    evaluating.require_savable(file, "save")
    given = _Given(settings, changes)
    with logging_as_it_was(), placed_at(given.places):
        found = await evaluating.evaluate_model(given.settings, limit=limit, greedy=greedy, given=given.objects)
    if file is not None:
        try:
            await asyncio.to_thread(evaluating.save_rollouts, found, file, "save")
        except DataError as error:
            measured = evaluating.evaluation_text(given.settings.model.name, found)
            raise DataError(f"{error}; what was measured is not lost:\n{measured}") from error
    return {one.environment: one for one in found}


def evaluate(
    settings: Settings,
    changes: Mapping[str, Any] | None = None,
    *,
    limit: int | None = None,
    greedy: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> dict[str, EnvironmentEvaluation]:
    """Measure a model on held-out tasks; the result by environment.

    Args:
        settings: Of the run whose environments are meant, as in `train`.
        changes: Laid over them: `{"model.name": result.checkpoint}` measures what a run made.
        limit: Only the first so many held-out tasks of each environment.
        greedy: Measure greedy decoding as well.
        save: Append the rollouts, readable, to this .jsonl file.

    Raises:
        TailraceError: As `train` does; `DataError` where no environment has held-out tasks, and, with the figures,
            where the rollouts cannot be saved after all.
    """
    _require_no_loop("evaluate")
    return run_on_event_loop(evaluate_async(settings, changes, limit=limit, greedy=greedy, save=save))


def _require_no_loop(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise LifecycleError(
        f"tailrace.{name} cannot be called while an event loop runs, as in a notebook or an async function: write "
        f"`await tailrace.{name}_async(...)` there"
    )


def _interrupt(code: ExitCode) -> NoReturn:
    """For a second Ctrl-C: the program decides whether it ends."""
    raise KeyboardInterrupt


def _path(given: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(given))


class _Given:
    """Settings as a program gives them: with names in place of the environments that it gave as objects."""

    def __init__(self, settings: Settings, changes: Mapping[str, Any] | None, runs: Path = RUNS) -> None:
        self.objects: dict[str, object] = {}
        """Environments that only this process has, by name."""
        if isinstance(settings, RunSettings):
            settings = settings.model_dump(exclude_unset=True)
        by_name = os.fspath(settings) if isinstance(settings, str | os.PathLike) else None
        table = self._named(settings, "settings") if by_name is None else by_name
        self.settings, self.places = load_from_python(table, self._named(changes or {}, "changes"), runs)

    def _named(self, table: object, what: str) -> dict[str, Any]:
        if not isinstance(table, Mapping):
            what_else = "a recipe's name, a .toml file or tables" if what == "settings" else "settings by their names"
            raise SettingsError(f'{what} is {table!r:.80}; expected {what_else}, as in {{"max_steps": 20}}')
        named: dict[str, Any] = _plain(table, what)
        for key, value in named.items():
            if key == "environments" and isinstance(value, list):
                named[key] = [self._entry(one) for one in value]
            elif key == "environment":
                named[key] = self._entry(value)
            elif key == "environment.name":
                named[key] = self._name(value)
            elif key in ("environment.data", "environment.eval_data"):
                _refuse_rows(key.partition(".")[2], value)
        for key, found in _objects(named):
            raise SettingsError(
                f"{what}: {key} is of type {type(found).__name__}; settings are written down and sent to processes, so "
                "give numbers, text, lists and tables, and make the rest in the code that takes them"
            )
        return named

    def _entry(self, given: object) -> dict[str, Any]:
        """One environment's table."""
        entry = given if isinstance(given, dict) else {"name": given}
        for name in ("data", "eval_data"):
            _refuse_rows(name, entry.get(name))
        return entry | ({"name": self._name(entry["name"])} if "name" in entry else {})

    def _name(self, given: object) -> str | None:
        """A name is one already; what can be imported is named by where it is; else this process keeps it."""
        if given is None or isinstance(given, str):
            return given  # what reads the settings says what is wrong with None
        if (importable := _importable_name(given)) is not None:
            return importable
        own = _own_name(given)
        name, number = f"{OF_THE_PROGRAM}{own}", 1
        while self.objects.setdefault(name, given) is not given:
            number += 1
            name = f"{OF_THE_PROGRAM}{own}-{number}"
        return name


def _refuse_rows(name: str, given: object) -> None:
    """Where the name of a data set stands, a program may have put its rows."""
    if not isinstance(given, str | None):
        tasks = "train_tasks" if name == "data" else "eval_tasks"
        raise SettingsError(
            f"environment.{name} is of type {type(given).__name__}, and names a file, a folder or a data set of the "
            f"hub; rows of this program go into the environment, EnvironmentSpec(name=..., agent=..., {tasks}=rows)"
        )


def _plain(value: Any, what: str) -> Any:
    """Tables and lists as TOML would give them, with text for paths, Python's own numbers for NumPy's, and of objects
    of settings what was set.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        if unnamed := [key for key in value if not isinstance(key, str)]:
            raise SettingsError(f"{what}: {unnamed[0]!r} names no setting: names are text")
        return {key: _plain(one, what) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, what) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _objects(value: Any, key: str = "") -> Iterator[tuple[str, object]]:
    """What no file of settings can hold, with its dotted name."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _objects(inner, f"{key}.{name}" if key else str(name))
    elif not isinstance(value, _LEAVES):
        yield key, value


def _importable_name(given: object) -> str | None:
    """`module:attribute` of what a module holds; None for what only this program has."""
    own = _own_name(given)
    # a spec does not know where it was made
    names = [*sys.modules] if isinstance(given, EnvironmentSpec) else [str(getattr(given, "__module__", ""))]
    for name in names:
        held = getattr(sys.modules.get(name), "__dict__", {})  # no `getattr` for its names: some modules import at that
        if sys.modules.get(name) is sys.modules["__main__"]:  # multiprocessing calls it `__mp_main__`, too
            continue
        for attribute in (own, *held):
            if held.get(attribute) is given and not attribute.startswith("_"):  # `builtins._` is what was typed last
                return f"{name}:{attribute}"
    return None


def _own_name(given: object) -> str:
    """Of a spec, a function or a class."""
    name = getattr(given, "__name__", None) or getattr(given, "name", None)
    return str(name or type(given).__name__).strip("<>")
