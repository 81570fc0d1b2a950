"""What the page says of `benchmarks/faults.py` is what it runs with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import faults

from tailrace.config import RunSettings
from tests.support.fault_cells import HASTY, STUCK, Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
SECTION = " ".join(PAGE.partition("## Faults: ")[2].partition("\n## ")[0].split())


def default(name: str) -> float:
    settings: Any = RunSettings.model_validate(
        {"name": "run", "max_steps": 1, "model": {"name": "m"}, "environments": [{"name": "reverse-text"}]}
    )
    for part in name.split("."):
        settings = getattr(settings, part)
    return float(settings)


def test_the_page_names_the_deadlines_of_the_cells_and_the_defaults() -> None:
    options = (*HASTY, *STUCK)
    set_to = {
        option.removeprefix("--"): float(value) for option, value in zip(options[::2], options[1::2], strict=True)
    }
    scale = set_to.pop("deadline_scale")
    del set_to["restarts.backoff_s"]  # which is no deadline
    assert f"`deadline_scale` of {scale:g}" in SECTION
    for name, seconds in set_to.items():
        assert f"`{name}` {seconds * scale:g} s ({default(name):,g} s)" in SECTION


def test_a_victim_is_met_where_all_its_cells_are_and_end_in_time() -> None:
    good, late = Outcome("good", exit_s=1.0), Outcome("late", exit_s=faults.LIMIT_S)
    wrong, leaking = Outcome("wrong", wrong=["it went on"]), Outcome("leaking", leaks=["a socket"])
    assert [faults.row_of("trainer", [good, *more]).met for more in ([], [None], [late], [wrong], [leaking])] == [
        *(True, True, False, False, False)
    ]
    assert faults.row_of("trainer", [None]).met is None
