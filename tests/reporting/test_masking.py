"""Keys of servers that stand in settings: what a run shows has none of them, and its config.toml keeps them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tailrace.records import Json
from tailrace.reporting.masking import MASK, masked, masked_text
from tailrace.reporting.report import write_report
from tests.reporting.example_run import write_example_run

SETTINGS = """\
name = "run"

[[environments]]
name = "mcp"
[environments.args]
url = "https://me:sesame@host/mcp"
[environments.judge]
url = "https://me:sesame@judge/v1?api_key=sesame"
[environments.args.headers]
Authorization = "Bearer sesame"
X-Key = "$MCP_KEY"
X-Auth = "Bearer ${MCP_KEY}"

[[environments]]
name = "mcp"
[environments.args]
command = ["server"]
[environments.args.env]
API_KEY = "sesame"
OTHER = "sesame$MCP_KEY"

[trainer.loss.distillation]
url = "https://sesame@teacher:8000/v1"

[transport.redis]
url = "redis://trainer:sesame@redis/0"
"""


def test_what_may_be_a_key_is_masked_and_what_names_a_variable_is_shown() -> None:
    shown = tomllib.loads(masked_text(SETTINGS))
    by_url, by_command = (environment["args"] for environment in shown["environments"])
    assert by_url["url"] == "https://host/mcp"
    assert by_url["headers"] == {"Authorization": MASK, "X-Key": "$MCP_KEY", "X-Auth": "Bearer ${MCP_KEY}"}
    assert by_command["env"] == {"API_KEY": MASK, "OTHER": MASK}


def test_addresses_are_shown_without_users_and_passwords() -> None:
    shown = tomllib.loads(masked_text(SETTINGS))
    assert shown["environments"][0]["judge"]["url"] == "https://judge/v1"
    assert shown["trainer"]["loss"]["distillation"]["url"] == "https://teacher:8000/v1"
    assert shown["transport"]["redis"]["url"] == "redis://redis/0"


@pytest.mark.parametrize(
    "args",
    [
        {"env": "CartPole-v1"},  # an argument that is called so
        {"env": {"id": "wordle", "agent": {"harness": {"id": "null"}}, "max_turns": 8}},  # verifiers'
        {"headers": ["a", "b"], "names": {"key": "sesame"}},
    ],
)
def test_what_is_no_table_of_names_and_values_is_left_as_it_is(args: dict[str, Json]) -> None:
    settings: dict[str, Json] = {"environments": [{"name": "own:env", "args": args}]}
    assert masked(settings) == settings


@pytest.mark.parametrize(
    "text", ["seed  =  1 # as it was written\n", "environments = 1\n", "environments = [1]\n", "trainer = 1\n", ""]
)
def test_a_text_without_keys_is_shown_as_it_is_written(text: str) -> None:
    assert masked_text(text) == text


def test_nothing_is_shown_of_what_is_no_settings_file() -> None:
    assert masked_text('headers = "sesame') == ""


def test_a_report_shows_no_key(tmp_path: Path) -> None:
    write_example_run(tmp_path, steps=2)
    (tmp_path / "config.toml").write_text(SETTINGS)
    write_report(tmp_path)
    report = (tmp_path / "report.html").read_text()
    assert "sesame" not in report
    assert "$MCP_KEY" in report
    assert (tmp_path / "config.toml").read_text() == SETTINGS
