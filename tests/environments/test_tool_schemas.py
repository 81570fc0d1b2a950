"""What the policy is told of a Python function is what transformers' `get_json_schema` tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils import get_json_schema

from tailrace.environments.tool_schemas import tool_spec
from tailrace.errors import SettingsError
from tests.support.trl_environments import Given, IncrementEnv, Scoreless, set_everything


@pytest.mark.parametrize(
    "function", [IncrementEnv.increment, IncrementEnv().increment, Given.fail, Scoreless.say, set_everything]
)
def test_it_is_the_schema_that_transformers_makes(function: Callable[..., Any]) -> None:
    told = get_json_schema(function)["function"]
    assert tool_spec(function) == {key: told[key] for key in ("name", "description", "parameters")}


def no_hint(step) -> None:  # type: ignore[no-untyped-def]
    """Step.

    Args:
        step: How far.
    """


def not_told(step: int) -> None:
    """Step."""


def of_a_kind(step: object) -> None:
    """Step.

    Args:
        step: How far.
    """


def any_number(**steps: int) -> None:
    """Step.

    Args:
        steps: How far.
    """


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda: None, "has no docstring"),
        (no_hint, "'step' of tool no_hint has no type hint"),
        (not_told, "'step' of tool not_told is not described under `Args:`"),
        (of_a_kind, "cannot be written as a JSON Schema"),
        (any_number, "stands for any number of arguments"),
    ],
)
def test_what_it_cannot_tell_is_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        tool_spec(function)
