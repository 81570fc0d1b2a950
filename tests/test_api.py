"""Training and measuring from a program, as docs/python.md says."""

from __future__ import annotations

import asyncio
import doctest
import logging
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tomli_w

import tailrace
from tailrace.api import _Given, _importable_name
from tailrace.environments import EnvironmentSpec
from tailrace.errors import DataError, LifecycleError, SettingsError
from tailrace.records import RunStatus, Task
from tailrace.reporting.summary import read_summary
from tailrace.training.settings.losses import CispoSettings
from tailrace.training.settings.trainer import TrainerSettings
from tests.run.runs import IMPORTS, ROOT
from tests.support import run_environments

SMALL: dict[str, Any] = {
    "placement": "inline",
    "observability": {"live": "off", "report": False},
    "rollouts": {"group_size": 2, "max_tokens": 6, "max_turns": 1},
    "scheduling": {"batch_size": 4, "filter_zero_spread": False, "row_tokens": 512},
    "generator": {"slots": 8, "max_cache_tokens": 512},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(**changes: Any) -> dict[str, Any]:
    return {"environment": run_environments.words, "max_steps": 2, **SMALL, **changes}


def test_an_object_of_settings_stands_for_the_table_of_what_was_set_in_it() -> None:
    tables = {"model": {"name": "bundled:quickstart"}, "environments": ["alphabet-sort"], "max_steps": 2}
    given = _Given({**tables, "trainer": TrainerSettings(learning_rate=1e-4)}, None)
    table = tomllib.loads(tomli_w.dumps(given.places.file.table))
    assert table["trainer"] == {"learning_rate": 1e-4}
    assert given.settings.trainer == TrainerSettings(learning_rate=1e-4)


def test_one_in_changes_leaves_the_rest_as_the_recipe_has_it(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'max_steps = 2\nmodel.name = "bundled:quickstart"\nenvironments = [{ name = "alphabet-sort" }]\n'
        'trainer.loss = { name = "cispo", lowest_weight = 0.5 }\n'
    )
    for changes in (
        {"trainer.loss": CispoSettings(truncation=3.0)},
        {"trainer": {"loss": CispoSettings(truncation=3)}},
    ):
        loss = _Given(recipe, changes).settings.trainer.loss
        assert loss == CispoSettings(lowest_weight=0.5, truncation=3.0)


def test_the_page_says_what_happens() -> None:
    page = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert page.attempted > 20
    assert page.failed == 0


def test_a_script_trains_an_agent_of_its_own_in_processes_of_their_own(tmp_path: Path) -> None:
    """It has no guard against being imported again, and its environment exists in it alone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    agent, example = (ROOT / "README.md").read_text().split("```python\n")[1:3]
    changes = {**SMALL, "placement": "local", "max_steps": 1}
    example = example.split("```")[0].replace('names.jsonl"}', f'names.jsonl"}}, **{changes}')
    (tmp_path / "script.py").write_text(agent.split("```")[0] + example)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=IMPORTS, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["finished", "runs/quickstart"]


async def test_where_a_loop_runs_the_synchronous_functions_say_what_to_write() -> None:
    for function in (tailrace.train, tailrace.evaluate):
        with pytest.raises(LifecycleError, match=rf"await tailrace\.{function.__name__}_async"):
            function("quickstart")


async def test_in_a_running_loop_callbacks_get_every_step_and_every_evaluation_in_order() -> None:
    steps, evaluations, threads = list[int](), list[int](), set[threading.Thread]()

    def on_step(step: tailrace.StepMetrics) -> None:
        threads.add(threading.current_thread())
        steps.append(step.step)

    async def on_evaluation(found: tailrace.StepMetrics) -> None:
        assert 0 <= found.metrics["eval/words/reward/mean"] <= 1
        evaluations.append(found.step)

    changes = run(max_steps=3, evaluation={"every_steps": 3, "tasks": 2})
    result = await tailrace.train_async("quickstart", changes, on_step=on_step, on_evaluation=on_evaluation)
    assert result.status is RunStatus.FINISHED
    assert steps == [1, 2, 3]
    assert evaluations[-1] == 3
    assert threading.main_thread() not in threads


def test_a_callback_that_returns_true_ends_the_run_with_a_last_save() -> None:
    result = tailrace.train("quickstart", run(max_steps=1000), on_step=lambda step: np.int32(step.step) >= 2)
    assert result.status is RunStatus.FINISHED
    assert 2 <= result.summary.steps < 1000
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"step_{result.summary.steps:06d}"


def test_what_a_callback_raises_ends_the_run_in_order_and_is_raised() -> None:
    def on_step(step: tailrace.StepMetrics) -> None:
        raise ZeroDivisionError("of the program")

    with pytest.raises(ZeroDivisionError, match="of the program"):
        tailrace.train("quickstart", run(max_steps=1000), on_step=on_step)
    summary = read_summary(Path("runs/quickstart"))
    assert summary is not None
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert summary.reason.endswith("on_step raised ZeroDivisionError: of the program")


def exit_in_a_thread(step: tailrace.StepMetrics) -> None:
    sys.exit(3)


async def exit_on_the_loop(step: tailrace.StepMetrics) -> None:
    sys.exit(3)


@pytest.mark.parametrize("on_step", [exit_in_a_thread, exit_on_the_loop])
def test_a_callback_that_exits_ends_the_run_in_order_and_then_the_program(
    on_step: Callable[[tailrace.StepMetrics], object],
) -> None:
    with pytest.raises(SystemExit) as raised:
        tailrace.train("quickstart", run(max_steps=1000), on_step=on_step)
    assert raised.value.code == 3
    summary = read_summary(Path("runs/quickstart"))
    assert summary is not None
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    assert summary.reason.endswith(f"{on_step.__name__} raised SystemExit: 3")
    assert Path(summary.checkpoint_path).name == f"step_{summary.steps:06d}"
    assert Path(summary.checkpoint_path).is_dir()


def test_a_second_interrupt_ends_everything_at_once_and_is_raised(tmp_path: Path) -> None:
    interrupted = []

    async def agent(task: Task, policy: tailrace.Policy) -> float:
        if len(interrupted) < 2:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return float(len((await policy.chat([{"role": "user", "content": "go on"}])).content))

    spec = EnvironmentSpec(name="interrupting", agent=agent, train_tasks=[{"word": "a"}, {"word": "b"}])
    with pytest.raises(KeyboardInterrupt):
        tailrace.train("quickstart", {**run(max_steps=1000), "environment": spec})
    assert len(interrupted) == 2
    assert read_summary(Path("runs/quickstart")) is None


def test_environments_may_be_objects_of_this_process_or_of_a_module() -> None:
    here = EnvironmentSpec(name="here", agent=run_environments.answer, train_tasks=[{"word": "a"}, {"word": "b"}])
    words = {"name": run_environments.words, "args": {"count": np.int64(64)}}
    environments = [here, words, run_environments.spelling, run_environments.wrapped]
    settings = {"name": "four", "model": {"name": "bundled:quickstart"}, "environments": environments}
    result = tailrace.train(settings, {"max_steps": 1, **SMALL}, runs="elsewhere")
    assert result.summary.environments == ["here", "words", "spelling", "wrapped"]
    assert result.folder == Path("elsewhere/four")
    written = (result.folder / "config.toml").read_text()
    assert 'name = "<program>:here"' in written
    assert 'name = "tests.support.run_environments:words"' in written  # so that any process can load it
    assert 'name = "tests.support.run_environments:spelling"' in written
    assert 'name = "tests.support.run_environments:wrapped"' in written
    assert "count = 64" in written


def test_a_spec_of_the_program_itself_has_no_module_that_other_processes_could_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = EnvironmentSpec(name="here", agent=run_environments.answer)
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "here", spec, raising=False)
    monkeypatch.setitem(sys.modules, "__mp_main__", program)  # as multiprocessing does
    assert _importable_name(spec) is None


def test_to_find_the_module_of_a_spec_asks_none_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy")

    def load(name: str) -> object:
        raise RuntimeError(f"{name} needs what is not installed")

    monkeypatch.setattr(lazy, "__getattr__", load, raising=False)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert _importable_name(EnvironmentSpec(name="here", agent=run_environments.answer)) is None


def test_a_run_of_an_environment_of_this_process_goes_on_with_what_it_was_given_at_its_start() -> None:
    spec = EnvironmentSpec(name="here", agent=run_environments.answer, train_tasks=[{"word": "a"}, {"word": "b"}])
    given = {"environments": [spec], "model": {"name": "bundled:quickstart"}, "max_steps": 1000}
    first = tailrace.train(given, {**SMALL, "trainer.learning_rate": 3e-4}, on_step=lambda step: True)
    steps = first.summary.steps + 1
    with pytest.raises(SettingsError, match=rf"max_steps = {steps} in place of 1000"):
        tailrace.train(given, {"resume": True, "max_steps": steps})
    second = tailrace.train(given, {"resume": True, "max_steps": steps, "allow_changed_settings": True})
    assert (second.status, second.summary.steps, second.summary.starts) == (RunStatus.FINISHED, steps, 2)
    assert [line["step"] for line in second.metrics()] == [*range(1, steps + 1)]
    assert "learning_rate = 0.0003" in (second.folder / "config.toml").read_text()


@pytest.mark.parametrize("name", ["here", "arithmetic"])
def test_a_run_of_an_object_goes_on_with_no_other_environment_in_its_place(name: str) -> None:
    """The name alone may be that of an environment that everybody has."""
    spec = EnvironmentSpec(name=name, agent=run_environments.answer, train_tasks=[{"word": "a"}, {"word": "b"}])
    first = tailrace.train("quickstart", {**run(), "environment": spec}, on_step=lambda step: True)
    again = rf'<program>:{name}.* give that object again .*"environment": {name}\}}\)$'
    with pytest.raises(SettingsError, match=again):
        tailrace.train("quickstart", {"resume": True})
    assert read_summary(first.folder) == first.summary


def test_synchronous_code_that_no_worker_can_import_is_refused_unless_trusted() -> None:
    def reward(task: Task, messages: list[Any]) -> float:
        return float(len(messages[-1]["content"]))

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    spec = EnvironmentSpec(name="plain", agent=run_environments.answer, reward=reward, train_tasks=rows)
    with pytest.raises(SettingsError, match=r"'plain' was given as an object .* trusted = True"):
        tailrace.train("quickstart", {**run(), "environment": spec})


def test_what_is_wrong_is_told_with_its_place() -> None:
    with pytest.raises(SettingsError, match=r"changes: trainer\.learning_rat is no setting"):
        tailrace.train("quickstart", {"trainer": {"learning_rat": 1.0}})
    with pytest.raises(SettingsError, match=r"settings: max_step is no setting; did you mean max_steps"):
        tailrace.train({"max_step": 1, "model": {"name": "m"}, "environments": ["words"]})
    rows: Any = [{"word": "a"}]
    for settings, changes, message in (
        (
            "quickstart",
            {"environment": {"name": run_environments.words, "data": rows}},
            r"of type list, .*train_tasks=r",
        ),
        ("quickstart", {"environment": {"name": "own:agent", "eval_data": rows}}, r"eval_data .*eval_tasks=rows\)"),
        ("quickstart", {"environment": None}, r"changes: environment\.name = None: input should be a valid string"),
        ("quickstart", {"environment.data": rows}, r"of type list, .*train_tasks=rows\)"),
        (
            {"environments": [{"name": "own:agent", "args": {"most": threading.Lock()}}]},
            {},
            r"^settings: environments\.0\.args\.most is of type lock; .* give numbers, text, lists and tables",
        ),
        (
            "quickstart",
            {"environment": {"name": run_environments.words, "args": {"counts": [1, object()]}}},
            r"^changes: environment\.args\.counts\.1 is of type object; settings are written down",
        ),
        ("quickstart", {"trainer.loss.args": {"scale": np.ones(2)}}, r"trainer\.loss\.args\.scale is of type ndarray"),
        ("quickstart", {"environment.args": {"words": iter("ab")}}, r"args\.words is of type str_\w*iterator"),
        ("quickstart", {"environment.args": {"words": {"a", "b"}}}, r"args\.words is of type set"),
        ("quickstart", {"model": rows * 1000}, r"changes: model = \[\{.{190,199}\.\.\.: it is a section"),
        (
            {"environments": ["words"]},
            {},
            r'model is missing; write a table \[model\] .*, or give "model\.name" in changes',
        ),
        ("quickstart", {"environments": {"name": "words"}}, "write environment.name for that of the only one"),
        ("quickstart", {3: 1}, "changes: 3 names no setting"),
        ("quickstart", {"trainer": {3: 1}}, "changes: 3 names no setting"),
        ("quickstart", ["--max_steps", "3"], r"changes is \['--max_steps', '3'\]; expected settings by their names"),
        (7, None, r"settings is 7; expected a recipe's name, a \.toml file or tables"),
    ):
        with pytest.raises(SettingsError, match=message):
            tailrace.train(settings, changes)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="on_step is 3; expected a function of one StepMetrics"):
        tailrace.train("quickstart", on_step=3)  # type: ignore[arg-type]
    for limit in (0, "3", 2.5, True):
        with pytest.raises(SettingsError, match=f"limit is {limit!r}; it counts held-out tasks"):
            tailrace.evaluate("quickstart", limit=limit)  # type: ignore[arg-type]


def test_the_programs_logging_is_its_own_again_and_another_thread_may_train() -> None:
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    before = [*logging.getLogger().handlers]
    found = []
    thread = threading.Thread(target=lambda: found.append(tailrace.train("quickstart", run(max_steps=1)).status))
    thread.start()
    thread.join()
    assert found == [RunStatus.FINISHED]
    assert logging.getLogger().handlers == before


def test_an_evaluation_measures_by_environment() -> None:
    found = asyncio.run(tailrace.evaluate_async("quickstart", run(), limit=3, greedy=True, save="played.jsonl"))
    measured = found["words"]
    assert len(measured.result.rewards) == 3
    assert measured.greedy is not None
    assert len(Path("played.jsonl").read_text().splitlines()) == 6


def test_an_evaluation_that_cannot_be_saved_is_refused_before_or_tells_what_it_measured() -> None:
    with pytest.raises(SettingsError, match=r"^save: cannot write /: Is a directory$"):
        tailrace.evaluate("quickstart", run(), save="/")
    with pytest.raises(DataError, match=r"(?s)^save: cannot write /dev/full: No space .* over 2 held-out tasks"):
        tailrace.evaluate("quickstart", run(), limit=2, save="/dev/full")
