"""`docs/architecture.md` maps every room, and it and README name files that exist; in its walk calls go down."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|errors\.py|cli\.py)`")


def layers() -> dict[str, int]:
    """Room to its height, 0 on top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {room.strip(): height for height, row in enumerate(contracts[0]["layers"]) for room in row.split("|")}


def walk() -> dict[str, list[str]]:
    """The files of each part of the walk, by its heading."""
    text = PAGE.split("## One task", 1)[1].split("\n## ", 1)[0]
    return {part.split("\n", 1)[0]: PATH.findall(part) for part in text.split("\n### ")[1:]}


def test_every_file_that_is_named_exists() -> None:
    named = PATH.findall(PAGE) + PATH.findall((ROOT / "README.md").read_text())
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT / "src/tailrace", ROOT))]
    assert len(named) > 60
    assert not missing


def test_every_room_is_in_the_map() -> None:
    rooms = {path.parent.name + "/" for path in (ROOT / "src/tailrace").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "src/tailrace").glob("*.py")}
    mapped = set(re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE))
    assert (rooms | modules) - mapped == {"recipes/", "__init__.py", "__main__.py"}


def test_the_walk_names_each_file_once() -> None:
    files = [file for part in walk().values() for file in part]
    assert len(files) == len(set(files)) > 40


def test_within_a_part_calls_only_go_down() -> None:
    heights = layers()
    for heading, files in walk().items():
        climbed = [heights[file.split("/")[0]] for file in files]
        assert climbed == sorted(climbed), heading
