"""`examples/cluster/` holds what the commands of docs/jobs.md print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tailrace.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^tailrace cluster render (?:.*\\\n)*.*$", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    """Arguments, and the file that they are printed to."""
    found = [one.replace("\\\n", " ") for one in COMMAND.findall((ROOT / "docs/jobs.md").read_text())]
    return [(before.strip(), after.strip()) for before, _, after in (one.partition(">") for one in found)]


def test_every_file_of_the_examples_has_its_command() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "examples/cluster").glob("*/*")}
    assert files == {file for _, file in documented()}


@pytest.mark.parametrize(("command", "file"), documented(), ids=[file for _, file in documented()])
def test_an_example_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, file: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == (ROOT / file).read_text()
