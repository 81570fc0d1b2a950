"""Views of groups and tokens inside the report of a run: the dashboard's modules, and the answers that they ask for.

    static/*.js ── joined into one script ──┐
    chosen rollouts ── answers, compressed ─┴─► `Views` ─► report.html, which asks nobody

A report keeps the chosen rollouts, their groups and their first tokens, as far as they fit.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec

from tailrace.dashboard.rollout_files import RolloutFiles, RolloutRow, RolloutTable, StepFiles, shortened
from tailrace.dashboard.token_view import TokenReader, token_steps
from tailrace.errors import DataError
from tailrace.reporting.report import Views
from tailrace.reporting.run_folder import ROLLOUTS_FOLDER, ChosenRollout

_logger = logging.getLogger(__name__)
_MOST_BYTES = 4_000_000
"""Of all answers together, in the page."""
_MOST_BRANCHES = 8
_SIBLINGS = 15
"""Of a chosen rollout, with all of their texts: as many as the view of a group shows beside it."""
_MAIN, _API, _REPORT_API = "report_main.js", "api.js", "report_api.js"
_IMPORT = re.compile(r'^import (?P<names>\{[^}]*\}|\* as \w+) from "(?P<path>[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (?P<name>\w+))", re.MULTILINE)


def report_views(run_folder: Path, chosen: Sequence[ChosenRollout]) -> Views | None:
    """What the report of a run shows of these; None where it shows no rollout, or they can no longer be read."""
    if not chosen:
        return None
    kept = _Kept()
    try:
        with_tokens = _keep(kept, run_folder, chosen)
    except (DataError, OSError) as error:
        _logger.warning("the report has no views of its rollouts: %s", error)
        return None
    name = run_folder.resolve().name
    links = {
        one.record.rollout_id: [
            ("group", _place(name, "group", one.record.step, one.record.group_id)),
            *([("tokens", _place(name, "tokens", one.record.step, one.record.rollout_id))] * (one in with_tokens)),
        ]
        for one in chosen
    }
    steps = token_steps(run_folder)
    return Views(
        style=_static("style.css"),
        script=joined_modules(),
        kept=kept.text(StepFiles(steps.steps, [])),
        links=links,
    )


class _Kept:
    """Answers to what the views ask for, up to a number of bytes."""

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}
        self._left = _MOST_BYTES

    def add(self, part: str, step: int, value: object, *, branch: int = 0, id: str = "") -> bool:
        """Whether there is room for it."""
        answer = base64.b64encode(gzip.compress(msgspec.json.encode(value), mtime=0)).decode()
        if len(answer) > self._left:
            return False
        self._left -= len(answer)
        self._answers[f"{part} step {step} {branch} {id}"] = answer
        return True

    def text(self, tokens: StepFiles) -> str:
        """As JSON that no page takes for markup."""
        kept = {"about": {"tokens": tokens}, "answers": self._answers}
        return msgspec.json.encode(kept).decode().replace("<", "\\u003c")


def _keep(kept: _Kept, run_folder: Path, chosen: Sequence[ChosenRollout]) -> list[ChosenRollout]:
    """What matters most comes first: groups, chosen rollouts, their tokens, then who stands beside them.

    Returns those whose tokens are kept.
    """
    files = RolloutFiles(run_folder / ROLLOUTS_FOLDER)
    groups = {one.record.group_id for one in chosen}
    for step in sorted({one.record.step for one in chosen}):
        kept.add(
            "rollouts",
            step,
            RolloutTable("step", step, [row for row in files.rows("step", step) if row.group_id in groups]),
        )
    for one in chosen:
        _keep_record(kept, files, one.record.step, one.record.rollout_id)
    with_tokens = [one for one in chosen if _keep_tokens(kept, run_folder, one)]
    for step, row in _siblings(files, chosen):
        _keep_record(kept, files, step, row.rollout_id)
    return with_tokens


def _keep_record(kept: _Kept, files: RolloutFiles, step: int, rollout_id: str) -> None:
    kept.add("rollout", step, shortened(files.record("step", step, rollout_id)), id=rollout_id)


def _keep_tokens(kept: _Kept, run_folder: Path, one: ChosenRollout) -> bool:
    """The first page of each branch; False where there is none. A file that is broken has none."""
    reader, record = TokenReader(), one.record
    for branch in range(_MOST_BRANCHES):
        try:
            page = reader.page(
                run_folder, record.rollout_id, step=record.step, is_evaluation=False, branch=branch, first=0
            )
        except (DataError, ModuleNotFoundError):
            return False
        if page is None or not kept.add("tokens", record.step, page, branch=branch, id=record.rollout_id):
            return branch > 0
    return True


def _siblings(files: RolloutFiles, chosen: Sequence[ChosenRollout]) -> Iterator[tuple[int, RolloutRow]]:
    """Those of the groups in turn, so that none takes the others' room."""
    known, places = (
        {one.record.rollout_id for one in chosen},
        {(one.record.step, one.record.group_id) for one in chosen},
    )
    groups = [
        [(step, row) for row in files.rows("step", step) if row.group_id == group and row.rollout_id not in known]
        for step, group in sorted(places)
    ]
    for one_of_each in zip_longest(*(group[:_SIBLINGS] for group in groups)):
        yield from (found for found in one_of_each if found is not None)


def _place(run: str, view: str, step: int, id: str) -> str:
    return f"#/run/{quote(run, safe='')}/{view}?{urlencode({'step': step, 'id': id})}"


def joined_modules() -> str:
    """All modules that the views of a report need as one script: each a function that returns what it exports."""
    order: dict[str, str] = {}
    _add_module(_MAIN, order)
    return '"use strict";\n' + "".join(order.values())


def _add_module(path: str, order: dict[str, str]) -> str:
    """Add a module behind those that it imports. Returns the name of what it exports."""
    name = re.sub(r"\W", "_", path)
    if path in order:
        return name
    text = _static(path)
    for found in _IMPORT.finditer(text):
        theirs = _add_module(_imported(path, found["path"]), order)
        names = found["names"].removeprefix("* as ").replace(" as ", ": ")
        text = text.replace(found[0], f"const {names} = {theirs};\n", 1)
    exported = ", ".join(found["name"] for found in _EXPORT.finditer(text))
    order[path] = f"const {name} = (() => {{\n{_EXPORT.sub('', text)}return {{ {exported} }};\n}})();\n"
    return name


def _imported(path: str, named: str) -> str:
    """
    >>> _imported("views/group.js", "../dom.js"), _imported("dom.js", "./format.js"), _imported("dom.js", "./api.js")
    ('dom.js', 'format.js', 'report_api.js')
    """
    folder = [] if named.startswith("../") else path.split("/")[:-1]
    found = "/".join([*folder, named.removeprefix("../").removeprefix("./")])
    return _REPORT_API if found == _API else found


def _static(path: str) -> str:
    return (importlib.resources.files(__package__) / "static" / path).read_text(encoding="utf-8")
