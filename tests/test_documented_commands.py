"""Every `tailrace train` of README, docs and examples that names a packaged recipe is one that can be run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config import list_recipes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
COMMAND = re.compile(r"^ *tailrace train (?:.*\\\n)*.*$", re.MULTILINE)
OF_READERS = re.compile(r"own:|my_module:|rows\.jsonl|--resume")
"""Stands for what a reader has written, or has run before."""


def documented() -> list[str]:
    """Arguments, one text for each command."""
    found = [one for page in PAGES for one in COMMAND.findall(page.read_text().replace("\\\\\n", "\\\n"))]
    lines = [re.sub(r"\\\n *", "", one).split("#")[0].split("tailrace train ", 1)[1].strip() for one in found]
    return sorted({line for line in lines if line.split()[0] in list_recipes() and not OF_READERS.search(line)})


def test_there_are_such_commands() -> None:
    assert len(documented()) > 15


@pytest.mark.parametrize("arguments", documented())
def test_a_documented_command_is_one_that_can_be_run(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    assert main(["train", *shlex.split(arguments), "--dry-run"]) == 0, capsys.readouterr().err
