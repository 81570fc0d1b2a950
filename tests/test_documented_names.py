"""Settings and metrics that README, the pages of docs and errors name are ones that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tailrace.config import settings_reference
from tailrace.reporting.metrics import METRICS, metric_spec
from tailrace.reporting.totals import CURVES

ROOT = Path(__file__).parents[1]
GENERATED = {"settings.md", "simulation-settings.md", "metrics.md"}
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)]
OF_OTHERS = ("environments.args.", "generator.vllm.", "environments.rewards.")
"""Followed by names that are no settings of ours."""
REFUSED = {"trainer.tensor_parallel", "trainer.learning_rat"}
"""Told of because they are refused."""


def known_settings() -> set[str]:
    """Every `section`, which some are set by as a whole, and every `section.name`."""
    known = set()
    for block in settings_reference().split("\n## ")[1:]:
        if (section := re.match(r"`([\w.]+)`", block)) is not None:
            known |= {section[1], *(f"{section[1]}.{name}" for name in re.findall(r"^\| `(\w+)` \|", block, re.M))}
    return known


SETTINGS = known_settings()
SECTIONS = {*(name.split(".")[0] for name in SETTINGS if "." in name), "environment"}
SETTING = re.compile(rf"(?:`|--)((?:{'|'.join(sorted(SECTIONS))})\.\w+(?:\.\w+)*)(?=[`\s=])")
ADVISED = re.compile(rf"(?<![\w./`:])((?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_]+)+)(?![(/\w])")
METRIC = re.compile(rf"`((?:{'|'.join(sorted({name.split('/')[0] for name in METRICS}))})/[\w{{}}<>/-]*[\w}}>])`")


def as_settings(names: Iterable[str]) -> set[str]:
    """Those that are names of settings of ours, and of no file."""
    found = {re.sub(r"^environment\.", "environments.", name) for name in names}
    files = {name for name in found if name.endswith((".md", ".json", ".pt", ".safetensors"))}
    return {name for name in found - files - REFUSED if not name.startswith(OF_OTHERS)}


def settings_of(page: Path) -> set[str]:
    return as_settings(SETTING.findall(page.read_text()))


def raised_texts(file: Path) -> Iterator[str]:
    for statement in ast.walk(ast.parse(file.read_text())):
        if isinstance(statement, ast.Raise):
            for part in ast.walk(statement):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def metrics_of(page: Path) -> set[str]:
    """Of a family, the name with a word in the place of what stands for any."""
    return {re.sub(r"[<{]\w+[>}]", "any", name) for name in METRIC.findall(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_setting_and_metric_of_a_page_is_there(page: Path) -> None:
    assert settings_of(page) - SETTINGS == set()
    for name in metrics_of(page):
        metric_spec(name)


def test_every_setting_that_an_error_names_is_there() -> None:
    texts = [text for file in (ROOT / "src").rglob("*.py") for text in raised_texts(file)]
    named = as_settings(name for text in texts for name in ADVISED.findall(text))
    assert len(named) > 50
    assert named - SETTINGS == set()


def test_pages_name_settings_and_metrics() -> None:
    assert len(set.union(*map(settings_of, PAGES))) > 140
    assert len(set.union(*map(metrics_of, PAGES))) > 100


def test_the_page_of_curves_tells_of_every_one_that_the_live_view_draws() -> None:
    assert {"reward/mean", "training/learning_rate", *CURVES} <= metrics_of(ROOT / "docs" / "curves.md")
