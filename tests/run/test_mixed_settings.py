"""What each environment of a run may have for itself is honoured from its settings to its rollouts' files."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.config import load_settings
from tailrace.errors import SettingsError
from tailrace.records import RunStatus
from tailrace.reporting.summary import RunSummary
from tailrace.run.training import train
from tests.run.runs import records, rollouts

SETTINGS = """
max_steps = 8
placement = "inline"
model.name = "bundled:quickstart"
rollouts = { group_size = 2, max_tokens = 5, max_turns = 2, timeout_s = 60 }
scheduling = { batch_size = 12, row_tokens = 512, filter_zero_spread = false, max_retries = 0 }
generator = { max_cache_tokens = 512, slots = 16 }
observability = { live = "off", report = false }

[[environments]]
name = "tests.support.run_environments:talking"
id = "plain"
weight = 2

[[environments]]
name = "tests.support.run_environments:talking"
id = "own"
group_size = 3
max_tokens = 3
max_turns = 4
temperature = 0.5
columns = ["replies", "said"]

[[environments]]
name = "tests.support.run_environments:sleeping"
id = "late"
timeout_s = 0.05
"""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def summary(parent: Path) -> RunSummary:
    settings = parent / "mixed.toml"
    settings.write_text(SETTINGS)
    return asyncio.run(train(load_settings(str(settings)), parent))


@pytest.fixture(scope="module")
def of(parent: Path, summary: RunSummary) -> dict[str, list[dict[str, Any]]]:
    assert summary.status is RunStatus.FINISHED
    written = rollouts(parent / "mixed")
    return {name: [record for record in written if record["environment"] == name] for name in ("plain", "own")}


def test_sampling_and_limits_are_each_environments_own(of: dict[str, list[dict[str, Any]]]) -> None:
    for name, temperature, max_tokens, max_turns in (("plain", 1.0, 5, 2), ("own", 0.5, 3, 4)):
        for record in of[name]:
            assert (record["sampling"]["temperature"], record["sampling"]["max_tokens"]) == (temperature, max_tokens)
            assert record["turns"] == max_turns
            assert record["completion_tokens"] <= max_turns * max_tokens


def test_group_sizes_are_each_environments_own(of: dict[str, list[dict[str, Any]]]) -> None:
    for name, size in (("plain", 2), ("own", 3)):
        trained = Counter(record["group_id"] for record in of[name] if record["outcome"]["state"] == "trained")
        assert set(trained.values()) == {size}


def test_the_columns_asked_for_are_saved_and_no_others(of: dict[str, list[dict[str, Any]]]) -> None:
    assert {frozenset(record["columns"]) for record in of["plain"]} == {frozenset({"said", "loud"})}
    assert {frozenset(record["columns"]) for record in of["own"]} == {frozenset({"said", "replies"})}
    assert {record["columns"]["replies"] for record in of["own"]} == {4}


def test_a_time_limit_of_its_own_ends_its_rollouts_alone(summary: RunSummary) -> None:
    assert set(summary.ledger.by_reason["failed"]) == {"timeout"}


def test_the_metrics_tell_the_mix_of_what_is_trained(parent: Path, summary: RunSummary) -> None:
    lines = records(parent / "mixed" / "metrics.jsonl")
    last = lines[-1]
    trained = Counter(
        record["environment"]
        for record in {record["group_id"]: record for record in rollouts(parent / "mixed")}.values()
        if record["outcome"]["state"] == "trained"
    )
    for name, size in (("plain", 2), ("own", 3)):
        share = last[f"environment/{name}/trained_share"]
        assert share == pytest.approx(trained[name] / trained.total(), abs=0.1)  # what is queued counts already
        assert 0 < max(line[f"environment/{name}/in_flight"] for line in lines) * size < 5 * 12 + size  # the budget
        assert last[f"environment/{name}/trainable_share"] == 1
    assert last["environment/late/trained_share"] == 0
    assert last["environment/late/trainable_share"] < 0.5


def test_a_group_size_that_does_not_divide_the_batch_is_refused_with_what_would(tmp_path: Path) -> None:
    settings = tmp_path / "mixed.toml"
    settings.write_text(SETTINGS.replace("group_size = 3", "group_size = 5"))
    with pytest.raises(SettingsError, match=r"no multiple of the group size 5 of environment 'own': write 10"):
        load_settings(str(settings))
