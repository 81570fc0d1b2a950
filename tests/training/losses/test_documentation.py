"""Each loss and each mask says its equation and its source, and the page of the losses knows them all."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tailrace.training.losses import LOSSES, Divisor
from tailrace.training.losses.demonstrations import CrossEntropy
from tailrace.training.losses.distillation import Distillation
from tailrace.training.losses.masks import MASKS
from tailrace.training.losses.reference_kl import ReferenceKl
from tailrace.training.settings.components import CrossEntropySettings, DistillationSettings, ReferenceKlSettings
from tests.training.losses.support import BUILT_IN, settings_of

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")
COMPONENTS = {
    ReferenceKlSettings: ReferenceKl,
    CrossEntropySettings: CrossEntropy,
    DistillationSettings: Distillation,
}
MADE_BY = {**LOSSES, **MASKS}


@pytest.mark.parametrize("made", [*MADE_BY.values(), *COMPONENTS.values()])
def test_each_states_an_equation_and_a_source(made: type) -> None:
    module = importlib.import_module(made.__module__ if hasattr(made, "__module__") else "")
    text = module.__doc__ or ""
    assert re.search(r"^    \S.*(=|≤|>)", text, re.M), "an equation, indented"
    assert re.search(r"arXiv:\d{4}\.\d{5}|\([\w.]+\.\w+/\S+", text), "a source"
    assert re.search(r"\b20\d\d\b", text), "its year"


def test_each_has_a_file_of_its_own() -> None:
    modules = [made.__module__.rpartition(".")[2] for made in MADE_BY.values()]
    assert modules == [str(settings.model_fields["name"].default) for settings in MADE_BY]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_page_says_what_each_divides_by(name: str) -> None:
    words = {
        "kept_tokens": "kept tokens",
        "planned_tokens": "planned tokens",
        "sequences": "sequences",
        "sequences_times_length": "sequences × `length`",
    }
    row = re.search(rf"^\| `{name}` .*$", PAGE, re.M)
    assert row is not None
    assert f"| {words[Divisor.of_loss(settings_of(name)).denominator]} |" in row[0]


@pytest.mark.parametrize("settings", COMPONENTS)
def test_the_page_knows_every_setting_of_a_component(settings: type) -> None:
    section = PAGE.partition("## Components")[2].partition(f"`{COMPONENTS[settings].name}` ")[2]
    for name in settings.model_fields:
        assert f"`{name}" in section, name


@pytest.mark.parametrize("settings", MADE_BY)
def test_the_page_knows_every_setting(settings: type) -> None:
    fields = settings.model_fields
    section = PAGE.partition(f"`{fields['name'].default}`")[2]
    for name in fields.keys() - {"name", "masks", "entropy", "reference_kl", "cross_entropy", "distillation"}:
        assert f"`{name}" in section, name
