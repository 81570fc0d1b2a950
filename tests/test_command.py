"""The `tailrace` command, but for training itself: what it prints, and the exit status that it ends with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace import __version__
from tailrace.cli import main
from tailrace.commands import Evaluate, Replay, Serve, Train, parse
from tailrace.config import list_recipes, load_settings, read_settings_file
from tailrace.free_ports import free_port
from tailrace.generation.settings import GeneratorSettings
from tailrace.run.folder import RunPaths, record_settings
from tests.run.runs import TINY, environment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "quickstart"], "there is no command 'trian'; did you mean 'train'?"),
        (["train", "quikstart"], "did you mean 'quickstart'?"),
        (["train", "nowhere.toml"], "cannot read the settings file nowhere.toml"),
        (["train", "no\x1b[2Jwhere.toml"], r"cannot read the settings file no\x1b[2Jwhere.toml"),
        (["train", "quickstart", "extra"], "unexpected argument 'extra'"),
        (
            ["train", "quickstart", "--dry-run", "--environment.args.max_name", "3"],
            "command line: environment.args.max_name: ",
        ),
        (
            ["train", "quickstart", "--environment.args.max_turns", "--dry-run"],
            "max_turns of alphabet-sort is no switch",
        ),
        (["train", "quickstart", "--trainer.learning_rate", "--dry-run"], "learning_rate is no switch"),
        (["recipes", "extra"], "this command takes no 'extra'"),
        (["eval", "quickstart", "--limit", "0"], "--limit is 0"),
        (["eval", "quickstart", "--environment.eval_tasks", "0", "--environment.name", "reverse-text"], "no held-out"),
        (["eval", "quickstart", "--model.name", "./nowhere"], "is no folder"),
        (["eval", "quickstart", "--save", "/"], "--save: cannot write /: Is a directory"),
        (["eval", "quickstart", "--save", "/dev/null/file"], "--save: cannot write /dev/null/file: Not a directory"),
        (["fetch-smollm2", "/dev/null"], "FOLDER: cannot write /dev/null/config.json: Not a directory"),
        (
            ["ui", "--chat", "http://127.0.0.1:1", "--chat-key", "/"],
            "--chat-key: cannot read the key file /: Is a directory",
        ),
    ],
)
def test_what_is_wrong_is_told_with_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "command", "settings"),
    [
        ("serve --join q --generator.slots 8", Serve(join="q"), "--generator.slots 8"),
        (
            "serve --http-key k --generator.slots 8 --http :1",
            Serve(http=":1", http_key=Path("k")),
            "--generator.slots 8",
        ),
        ("serve --generator.slots -8 m", Serve("m"), "--generator.slots -8"),
        ("serve --generator.slots=8 m -x", Serve("m"), "--generator.slots=8 -x"),
        ("train --seed 3 own.toml --dry_run", Train("own.toml", dry_run=True), "--seed 3"),
        ("replay --seed", Replay(), "--seed"),
    ],
)
def test_settings_stand_anywhere_among_a_commands_own_arguments(arguments: str, command: object, settings: str) -> None:
    assert parse(arguments.split()) == (command, settings.split())


def test_a_tilde_is_the_home_of_who_runs_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["eval", "quickstart", "--save=~/x.jsonl"])[0] == Evaluate("quickstart", save=tmp_path / "x.jsonl")
    assert parse(["serve", "m", "--key", "~/k"])[0] == Serve("m", key=tmp_path / "k")
    assert main(["key", "~/k.key"]) == 0
    assert (tmp_path / "k.key").is_file()
    (tmp_path / "own.toml").write_text('max_steps = 1\n[[environments]]\nname = "alphabet-sort"\n')
    changes = ["--model.name", "bundled:quickstart", "--transport.payload_folder", "~/p"]
    settings = load_settings("~/own.toml", changes)
    assert (settings.name, settings.transport.payload_folder) == ("own", f"{tmp_path}/p")
    generator = GeneratorSettings(join_key="~/a", connect_key="~nobody-at-all/b")
    assert (generator.join_key, generator.connect_key) == (f"{tmp_path}/a", "~nobody-at-all/b")


ARGUMENTS = """max_steps = 1
[model]
name = "bundled:quickstart"
[[environments]]
name = "reverse-text"
[[environments]]
name = "alphabet-sort"
{}
"""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("args = { max_name = 3 }", 8),
        ("args.power = 1\nargs.max_name = 3", 9),
        ("[environments.args]\npower = 1\nmax_name = 3", 10),
        ("[environments.args]\npower = 1\nmax_names = 'three'", 10),
        ("args.power = 0", 6),
    ],
)
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["eval"]])
def test_an_argument_that_the_environment_refuses_is_told_with_its_file_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], arguments: str, line: int
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(ARGUMENTS.format(arguments))
    assert main([*command, str(path)]) == 2
    assert f"run.toml, line {line}: environment.args" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["train", "quickstart"],
        ["train", "quickstart", "--dry-run"],
        ["eval", "quickstart"],
        ["serve", "bundled:quickstart"],
        ["simulate", "long-tail"],
        ["ui"],
    ],
)
def test_a_folder_that_was_removed_under_the_command_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(command) == 2
    said = "error the folder that this runs in is gone (No such file or directory): change to another\n"
    assert capsys.readouterr().err == said


WORDS = """
from tailrace.environments import EnvironmentSpec, Observation

class Word:
    def reset(self, task):
        return Observation.user(task["word"])
    def step(self, reply):
        return Observation.end(reward=1.0)

words_beside_the_file = EnvironmentSpec(
    name="words", environment=Word, train_tasks=[{"word": "a"}, {"word": "b"}], held_out=1
)
"""


def test_a_module_beside_the_settings_file_is_found_from_anywhere_and_in_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beside, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    beside.mkdir()
    elsewhere.mkdir()
    (beside / "module_beside.py").write_text(WORDS)
    settings = (
        ARGUMENTS.partition("[[environments]]")[0] + "[[environments]]\nname = 'module_beside:words_beside_the_file'"
    )
    (beside / "run.toml").write_text(settings)
    monkeypatch.chdir(elsewhere)
    assert main(["eval", str(beside / "run.toml"), "--json", "--rollouts.max_tokens", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["words"]["reward_mean"] == 1.0


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tailrace {__version__}\n"


def test_help_shows_what_names_and_resumes_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "--name NAME" in shown
    assert "--resume" in shown


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in list_recipes())


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_dry_run_of_every_recipe_loads_its_environments_and_shows_settings_that_can_be_run(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", recipe, "--dry-run"]) == 0
    shown, _, planned = capsys.readouterr().out.partition("\n\n  ")
    (tmp_path / "again.toml").write_text(shown)
    settings = load_settings(str(tmp_path / "again.toml"))
    assert settings == load_settings(recipe, ["--name", settings.name])
    assert f"The run finishes after about {settings.max_steps:,} steps." in planned


def test_a_dry_run_shows_settings_and_budgets_and_makes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", "--dry-run", "--max_steps", "7"]) == 0
    shown = capsys.readouterr().out
    assert "max_steps = 7" in shown
    assert "rollouts run at once" in shown
    assert "The run finishes after about 7 steps." in shown
    assert not list(tmp_path.iterdir())


WITH_HEADERS = f"""
{WORDS}
def words_behind_a_key(headers: dict[str, str]) -> EnvironmentSpec:
    return words_beside_the_file
"""


def test_a_dry_run_shows_no_key_of_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "module_with_headers.py").write_text(WITH_HEADERS)
    monkeypatch.chdir(tmp_path)
    environment = ["--environment.name", "module_with_headers:words_behind_a_key"]
    headers = ["--environment.args.headers", '{ X-Key = "sesame", X-Auth = "$KEY" }']
    assert main(["train", "quickstart", *environment, *headers, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "sesame" not in shown
    assert 'X-Key = "***"' in shown
    assert 'X-Auth = "$KEY"' in shown


def test_a_dry_run_of_a_resume_refuses_what_the_resume_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    resume = ["train", "quickstart", "--resume", "--dry-run"]
    assert main(resume) == 2
    assert "there is nothing to resume in runs/quickstart" in capsys.readouterr().err
    settings = load_settings("quickstart", ["--max_steps", "7"])
    record_settings(settings, RunPaths(tmp_path / "runs" / settings.name), read_settings_file("quickstart"))
    assert main(resume) == 0
    assert "The run finishes after about 7 steps." in capsys.readouterr().out
    assert main([*resume, "--max_steps", "9"]) == 2
    assert "max_steps = 9 in place of 7" in capsys.readouterr().err
    assert main([*resume, "--max_steps", "9", "--allow-changed-settings"]) == 0
    assert "The run finishes after about 9 steps." in capsys.readouterr().out


def test_a_recipe_whose_model_is_to_be_made_first_asks_no_hub_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "smollm2-arithmetic"]) == 2
    assert "model './models/smollm2-135m-instruct' is no folder" in capsys.readouterr().err


def test_an_evaluation_measures_and_saves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "rollouts.jsonl"
    assert main(["eval", "quickstart", "--limit", "3", "--json", "--save", str(saved)]) == 0
    found = json.loads(capsys.readouterr().out)["alphabet-sort"]
    assert found["tasks"] == 3
    assert 0.0 <= found["reward_mean"] <= 1.0
    rewards = [json.loads(line)["reward"] for line in saved.read_text().splitlines()]
    assert sum(rewards) / 3 == pytest.approx(found["reward_mean"])


def test_figures_are_printed_even_where_saving_fails_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "quickstart", "--limit", "2", "--json", "--save", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["alphabet-sort"]["tasks"] == 2
    assert "--save: cannot write /dev/full: No space left on device" in printed.err


def test_an_evaluation_makes_the_folders_of_what_it_saves_when_it_has_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "new" / "folder" / "rollouts.jsonl"
    assert main(["eval", "quickstart", "--save", str(saved), "--model.name", "./nowhere"]) == 2
    assert not list(tmp_path.iterdir())
    assert main(["eval", "quickstart", "--limit", "1", "--save", str(saved)]) == 0
    assert re.search(r"^alphabet-sort: mean reward \d\.\d{3} over 1 held-out tasks", capsys.readouterr().out)
    assert len(saved.read_text().splitlines()) == 1


def test_an_evaluation_of_an_environment_that_stays_away_fails_and_says_by_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = (*environment("calling"), "--environment.args.port", str(free_port()), "--environment.eval_tasks", "4")
    evaluate = ["eval", "quickstart", *TINY, *away, "--scheduling.max_failing_s", "0.5"]
    assert main([*evaluate, "--json"]) == 1
    printed = capsys.readouterr()
    figures = json.loads(printed.out)["calling"]
    assert (figures["tasks"], figures["failed"]) == (0, {"environment_failed": 4})
    last = printed.err.splitlines()[-1]
    assert last.startswith("error environment 'calling' could not be evaluated: 4 of 4 rollouts were lost; the newest")
    assert "ConnectionRefusedError" in last


def test_an_evaluation_prints_greedy_reward_and_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "quickstart", "--limit", "2", "--greedy", "--show", "1"]) == 0
    *conversation, figures = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"alphabet-sort/eval/0: reward [01]\.\d{3}", conversation[0])
    assert [line.split()[0] for line in conversation[1:3]] == ["user", "assistant"]
    assert re.match(r"alphabet-sort: mean reward \S+ ± \S+ \(greedy \S+ ± \S+\) over 2 held-out tasks", figures)


@pytest.mark.parametrize("module", ["tailrace", "tailrace.commands", "tailrace.run.training"])
def test_nothing_heavy_is_imported_where_the_orchestrator_starts(module: str) -> None:
    script = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
