"""A name, its arguments and a data set become an environment, or one clear message."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
from pydantic import ValidationError

from tailrace.environments import EnvironmentSettings, JudgeSettings, environment_names, load_environment
from tailrace.errors import DataError, SettingsError
from tests.support.scripted_policy import play

OWN = """
import datetime

from tailrace.environments import EnvironmentSpec, JudgeSettings, Observation, Policy, Task

async def agent(task: Task, policy: Policy, *, bonus: float = 0.0) -> float:
    reply = await policy.chat([{"role": "user", "content": task["word"]}])
    return float(reply.content == task["word"].upper()) + bonus

class Echo:
    def __init__(self, factor: int = 1):
        self.factor = factor
    def reset(self, task):
        self.word = task["word"]
        return Observation.user(self.word)
    async def step(self, reply):
        return Observation.end(reward=self.factor * float(reply["content"] == self.word))

shout = EnvironmentSpec(name="shout", agent=agent, train_tasks=[{"word": str(i)} for i in range(20)], held_out=5)

judged = EnvironmentSpec(
    name="judged",
    agent=agent,
    train_tasks=[{"word": "a"}],
    judge=JudgeSettings(url="http://judge/v1", rubric="Shorter is better.", max_tokens=64),
)

def factory(*, num_words: int, prefix: str = "w") -> EnvironmentSpec:
    rows = [{"word": f"{prefix}{i}"} for i in range(num_words)]
    return EnvironmentSpec(name="made", agent=agent, train_tasks=rows)

def keyed(*, headers: dict[str, str], sizes: int = 0) -> EnvironmentSpec:
    return shout

def dated(*, since: datetime.date) -> EnvironmentSpec:
    return EnvironmentSpec(name=f"{since!r}", agent=agent, train_tasks=[{"word": "a"}])

def no_factory() -> int:
    return 3

def strict_factory(**args: object) -> EnvironmentSpec:
    from pydantic import BaseModel, Field
    class Args(BaseModel):
        words: int = Field(gt=0)
    Args.model_validate(args)
    return shout

def raising_factory():
    raise OSError("no disk today")

def plain_agent(task, policy):
    return 1.0

async def half_an_agent(task):
    return 1.0

class OnlyReset:
    def reset(self, task): ...

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EnvironmentSettings]]:
    """Settings for things in a user's module that lies in the working folder."""
    (tmp_path / "own_things.py").write_text(OWN)
    (tmp_path / "breaks.py").write_text("\n\nprice = 1 / 0\n")
    (tmp_path / "no_python.py").write_text("def agent(:\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "needs_more.py").write_text("import surely_not_installed_package\n")
    (tmp_path / "rows.jsonl").write_text('{"word": "a"}\n{"word": "b"}\n{"word": "c"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def settings(attribute: str, **more: object) -> EnvironmentSettings:
        return EnvironmentSettings.model_validate({"name": f"own_things:{attribute}", **more})

    yield settings
    sys.modules.pop("own_things", None)


def test_a_finished_spec_is_taken_as_it_is_with_its_tasks_held_out(own: Callable[..., EnvironmentSettings]) -> None:
    spec = load_environment(own("shout"))
    train = {spec.train_task(index)["word"] for index in range(len(spec.train_tasks))}
    held_out = {spec.eval_task(index)["word"] for index in range(len(spec.eval_tasks))}
    assert (len(train), len(held_out), train & held_out) == (15, 5, set())


def test_loading_twice_gives_the_same_held_out_tasks(own: Callable[..., EnvironmentSettings]) -> None:
    first, second = load_environment(own("shout")), load_environment(own("shout"))
    assert list(first.eval_tasks) == list(second.eval_tasks)


async def test_a_bare_agent_plays_a_data_set(own: Callable[..., EnvironmentSettings]) -> None:
    spec = load_environment(own("agent", data="rows.jsonl", args={"bonus": "0.5"}))
    result = await play(spec, spec.train_task(1), ["B"])
    assert (spec.name, result.reward) == ("agent", 1.5)


async def test_a_bare_environment_class_plays_a_data_set(own: Callable[..., EnvironmentSettings]) -> None:
    spec = load_environment(own("Echo", data="rows.jsonl", args={"factor": 3}))
    assert (await play(spec, spec.train_task(0), ["a"])).reward == 3.0


def test_a_date_is_what_the_factory_asks_for(own: Callable[..., EnvironmentSettings]) -> None:
    since = date(2026, 1, 31)
    assert load_environment(own("dated", args={"since": since})).name == f"{since!r}"
    spec = load_environment(own("factory", args={"num_words": 3, "prefix": since}))
    assert spec.train_tasks[0] == {"word": "2026-01-310"}


@pytest.mark.parametrize("changes", [{}, {"own_weight": 0.5}, {"max_tokens": 1024, "url": None}])
def test_what_settings_leave_out_of_a_judge_is_the_environments_own_in_other_processes_too(
    own: Callable[..., EnvironmentSettings], changes: dict[str, object]
) -> None:
    settings = own("judged", judge=changes)
    again = EnvironmentSettings.model_validate_json(settings.model_dump_json())
    given = {name: value for name, value in changes.items() if value is not None}
    expected = {"url": "http://judge/v1", "rubric": "Shorter is better.", "max_tokens": 64} | given
    for one in (settings, again):
        assert load_environment(one).judge == JudgeSettings.model_validate(expected)


def test_a_factory_gets_its_arguments(own: Callable[..., EnvironmentSettings]) -> None:
    spec = load_environment(own("factory", args={"num_words": 4, "prefix": "x"}, id="four"))
    assert (spec.train_task(3)["word"], spec.train_task(3).task_id) == ("x3", "four/train/3")


@pytest.mark.parametrize(
    ("attribute", "args", "says"),
    [
        ("factory", {"num_word": 4}, "environment.args.num_word: own_things:factory takes no such argument; did you "),
        ("factory", {"num_words": "many"}, "environment.args.num_words of own_things:factory is 'many'"),
        ("factory", {}, "environment.args.num_words is missing: own_things:factory needs it; it is called for an Env"),
        ("agent", {"bonsu": 1}, "did you mean 'bonus'"),
        ("agent", {"policy": 1}, "no such argument"),
        ("Echo", {"factr": 1}, "did you mean 'factor'"),
        ("shout", {"words": 1}, "finished EnvironmentSpec and takes none"),
        ("shuot", {}, "did you mean own_things:shout"),
        (
            "strict_factory",
            {"words": 0},
            "environment.args.words of own_things:strict_factory: Input should be greater",
        ),
        ("number", {}, "that is 3; expected an EnvironmentSpec"),
        ("no_factory", {}, "returned a int, not an EnvironmentSpec"),
        ("raising_factory", {}, "that function raised OSError: no disk today ("),
        ("plain_agent", {}, "that is a function of a task and a policy that is not async; expected an EnvironmentSpec"),
        ("half_an_agent", {}, "that is an async function that takes (task); expected an EnvironmentSpec"),
        ("OnlyReset", {}, "OnlyReset has `reset` and no `step`, as TRL's environments do, and nothing scores it"),
        ("", {}, "written as module:attribute"),
    ],
)
def test_a_wrong_name_or_argument_is_told_with_the_right_one(
    own: Callable[..., EnvironmentSettings], attribute: str, args: dict[str, object], says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_environment(own(attribute, args=args, data="rows.jsonl"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"headers": {"X-Key": "sesame", "Retries": 5}}, "environment.args.headers.Retries of own_things:keyed: Input"),
        ({"headers": {}, "sizes": {"key": "sesame"}}, "environment.args.sizes of own_things:keyed: Input should be"),
        ({"headers": [{"key": "sesame"}]}, "environment.args.headers of own_things:keyed: Input should be"),
    ],
)
def test_a_wrong_value_in_a_table_is_told_by_its_place_and_nothing_beside_it(
    own: Callable[..., EnvironmentSettings], args: dict[str, object], says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_environment(own("keyed", args=args))
    assert says in str(caught.value)
    assert "sesame" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("alphabet-srot", "did you mean 'alphabet-sort'"),
        ("no_such_module:agent", "there is no module 'no_such_module' here"),
        ("own_things.py:shout", "named with dots and without .py, as in own_things:ATTRIBUTE"),
        ("./own_things.py:shout", "as in own_things:ATTRIBUTE"),
        ("/a/games/own_things.py:shout", "as in own_things:ATTRIBUTE"),
        ("needs_more:agent", "importing needs_more needs 'surely_not_installed_package'"),
        ("breaks:agent", "importing breaks raised ZeroDivisionError: division by zero ("),
        ("breaks:agent", "breaks.py, line 3)"),
        ("no_python:agent", "importing no_python raised SyntaxError: invalid syntax ("),
        ("leaves:agent", "importing leaves raised SystemExit"),
        ("builtins:print", "not an EnvironmentSpec"),
    ],
)
@pytest.mark.usefixtures("own")
def test_an_environment_that_cannot_be_found_says_why(name: str, says: str) -> None:
    with pytest.raises(SettingsError, match=r"environment\.name") as caught:
        load_environment(EnvironmentSettings(name=name))
    assert says in str(caught.value)


def test_an_installed_package_offers_environments_by_entry_point(
    own: Callable[..., EnvironmentSettings], tmp_path: Path
) -> None:
    folder = tmp_path / "offering-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[tailrace.environments]\nshouting = own_things:shout\n")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    assert "shouting" in environment_names()
    assert load_environment(EnvironmentSettings(name="shouting")).name == "shout"


def test_tasks_without_rows_are_refused(own: Callable[..., EnvironmentSettings]) -> None:
    with pytest.raises(DataError, match=r"'agent' has no task to train on; give environment\.data"):
        load_environment(own("agent"))


def test_a_data_set_with_other_columns_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    settings = EnvironmentSettings(name="reverse-text", data=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"task reverse-text/train/0 has no column 'prompt', .* its columns are: text"):
        load_environment(settings)


def test_a_data_set_without_a_column_that_a_named_reward_takes_is_refused_before_the_run_starts(
    own: Callable[..., EnvironmentSettings],
) -> None:
    rewards = {"longest": {"function": "tests.support.named_rewards:longest"}}
    assert len(load_environment(own("agent", data="rows.jsonl", rewards=rewards)).train_tasks) == 3
    Path("ragged.jsonl").write_text('{"word": "a"}\n{"words": "b"}\n')
    with pytest.raises(DataError, match=r"task agent/train/1 has no column 'word', .* its columns are: words"):
        load_environment(own("agent", data="ragged.jsonl", rewards=rewards))


def test_holding_out_every_task_is_refused(own: Callable[..., EnvironmentSettings]) -> None:
    with pytest.raises(DataError, match="has 3 tasks and 3 are to be held out"):
        load_environment(own("agent", data="rows.jsonl", eval_tasks=3))


def test_held_out_rows_of_their_own_are_cut_to_the_number_asked_for(own: Callable[..., EnvironmentSettings]) -> None:
    spec = load_environment(own("shout", eval_data="rows.jsonl", eval_tasks=2))
    assert (len(spec.train_tasks), [row["word"] for row in spec.eval_tasks]) == (20, ["a", "b"])


def test_a_worker_process_gets_the_environment_without_reading_rows(own: Callable[..., EnvironmentSettings]) -> None:
    spec = load_environment(own("agent", data="is/not/there.jsonl"), with_tasks=False)
    assert (spec.name, len(spec.train_tasks), spec.agent is not None) == ("agent", 0, True)


def test_trust_is_the_environments_unless_the_user_says_otherwise() -> None:
    assert load_environment(EnvironmentSettings(name="reverse-text")).trusted
    assert not load_environment(EnvironmentSettings(name="reverse-text", trusted=False)).trusted


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "reverse-text"])
def test_built_in_environments_load_by_name_and_never_share_a_task_between_training_and_eval(name: str) -> None:
    spec = load_environment(EnvironmentSettings(name=name, eval_tasks=50))
    train = {spec.train_task(index)["prompt"] for index in range(500)}
    held_out = {spec.eval_task(index)["prompt"] for index in range(50)}
    assert not train & held_out
    assert len(held_out) > 30


def test_settings_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValidationError, match="max_turn"):
        EnvironmentSettings.model_validate({"name": "arithmetic", "max_turn": 3})
