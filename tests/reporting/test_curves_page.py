"""docs/curves.md names metrics and settings that exist."""

from __future__ import annotations

import re

import pytest

from tailrace.config import settings_reference
from tailrace.reporting.metrics import METRICS
from tailrace.reporting.totals import CURVES
from tests.run.runs import ROOT

PAGE = (ROOT / "docs" / "curves.md").read_text()
NAMES = sorted(set(re.findall(r"`([a-z_]+[./][\w{}/.]+)`", PAGE)))
FILES = {"rollouts/step_000012.jsonl", "report.html", "metrics.jsonl"}


def known_settings() -> set[str]:
    """Every `section`, which some are set by as a whole, and every `section.name`."""
    known = set()
    for block in settings_reference().split("\n## ")[1:]:
        section = re.match(r"`([\w.]+)`", block)
        if section:
            known |= {section[1], *(f"{section[1]}.{name}" for name in re.findall(r"^\| `(\w+)` \|", block, re.M))}
    return known


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FILES])
def test_what_the_page_names_is_a_metric_or_a_setting(name: str) -> None:
    assert name in (METRICS if "/" in name else known_settings())


def test_the_page_tells_of_every_curve_that_the_live_view_draws() -> None:
    assert {"reward/mean", "training/learning_rate", *CURVES} <= {*NAMES}
