"""Every command of README, docs and examples is one that there is: those of `tailrace`, and those that make figures."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.commands import Cluster, Evaluate, Serve, Simulate, Try, parse
from tailrace.config import list_recipes, load_settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
LINE = re.compile(r"^ *(?:machine \w+ +|\w+=\w+ |\$ )?tailrace ((?:.*\\\n)*.*)$", re.MULTILINE)
INLINE = re.compile(r"`tailrace ([^`]+)`")
OF_SEVERAL = re.compile(r"\.\.\.|\[|\b[A-Z]{3,}\b(?!=)|^[\w-]+ (?:--\S+|render)$|^[\w-]+$")
"""Stands for several commands, or names an option."""
OF_READERS = re.compile(r"own:|my_module:|rows\.jsonl|--resume")
"""Stands for what a reader has written, or has run before."""
ON_GPUS = re.compile(r"\bcuda\b")
PROGRAM = re.compile(r"python ((?:benchmarks|tools)/\w+\.py)((?:\s(?:--?\w+|[\w/.*-]+))*)")
OPTION = re.compile(r'"(--\w+)"')


def documented() -> list[list[str]]:
    """The words after `tailrace` of commands on lines of their own and in sentences, each once."""
    found = set()
    for page in PAGES:
        text = page.read_text().replace("\\\\\n", "\\\n")
        lines = [re.sub(r"\\\n *", "", one).split(" #")[0].split(" > ")[0] for one in LINE.findall(text)]
        found |= {" ".join(one.split()) for one in [*lines, *INLINE.findall(text)]}
    return [shlex.split(one) for one in sorted(found) if not OF_SEVERAL.search(one)]


def trained() -> list[str]:
    """Arguments of `train` for a packaged recipe."""
    arguments = [shlex.join(words[1:]) for words in documented() if words[0] == "train" and words[1] in list_recipes()]
    return [one for one in arguments if not OF_READERS.search(one)]


def others() -> list[str]:
    return [shlex.join(words) for words in documented() if words[0] != "train"]


def programs() -> dict[str, set[str]]:
    """Those that make figures, and all options that pages give them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for page in PAGES:
        for program, arguments in PROGRAM.findall(page.read_text()):
            found[program] |= {word for word in arguments.split() if word.startswith("--")}
    return dict(found)


@pytest.mark.parametrize("arguments", [one for one in trained() if ON_GPUS.search(one)])
def test_settings_of_a_documented_command_for_gpus_are_there(arguments: str) -> None:
    recipe, *settings = shlex.split(arguments)
    assert load_settings(recipe, settings).trainer.device == "cuda"


def test_there_are_such_commands() -> None:
    assert len(trained()) > 30
    assert len(others()) > 20
    assert len(programs()) > 30


@pytest.mark.parametrize("arguments", [one for one in trained() if not ON_GPUS.search(one)])
def test_a_documented_command_is_one_that_can_be_run(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    assert main(["train", *shlex.split(arguments), "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", others())
def test_any_other_command_is_there_and_takes_what_it_is_given(command: str) -> None:
    parsed, settings = parse(shlex.split(command))
    if isinstance(parsed, Evaluate):
        load_settings(parsed.recipe, settings)
    elif not isinstance(parsed, Cluster | Serve | Simulate | Try):  # which take settings of a run or a plan
        assert settings == []


@pytest.mark.parametrize(("program", "options"), programs().items(), ids=programs())
def test_a_program_that_makes_figures_is_there_and_has_its_options(program: str, options: set[str]) -> None:
    source = (ROOT / program).read_text()
    known = {*OPTION.findall(source)}
    if re.search(r"\bkit\b", source):
        known |= {*OPTION.findall((ROOT / "benchmarks" / "kit.py").read_text())}
    assert options <= known


def test_make_demo_looks_for_its_checkpoint_in_the_folder_of_its_own_run(tmp_path: Path) -> None:
    clock = tmp_path / "date"  # at which no two looks show the same time
    clock.write_text(f"#!/bin/sh\necho tick >> {tmp_path}/ticks\nwc -l < {tmp_path}/ticks\n")
    clock.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["make", "--dry-run", "demo"]
    made = subprocess.run(command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert len({*re.findall(r"quickstart-\d+", made.stdout)}) == 1
