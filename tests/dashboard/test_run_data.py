from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from tailrace.dashboard.run_data import RunCache
from tailrace.reporting.sinks import decode_object
from tests.support.made_runs import MadeRun


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [MadeRun(folder=tmp_path / f"run_{number}") for number in range(3)]
    for run in made:
        run.write_steps(4, rollouts=False)
    return [run.folder for run in made]


def lines_read(cache: RunCache, folders: Sequence[Path]) -> int:
    """Where each of these is asked for once."""
    with patch("tailrace.dashboard.metric_columns.decode_object", wraps=decode_object) as reading:
        for folder in folders:
            cache.get(folder).metrics()
    return reading.call_count


@patch("tailrace.dashboard.run_data._KEPT_BYTES", 1)
def test_runs_that_somebody_looks_at_are_read_once_however_large_they_are(folders: list[Path]) -> None:
    now_s = 0.0
    cache = RunCache(lambda: now_s)
    assert lines_read(cache, folders) == 12
    for later_s in (2.0, 2.0, 29.0):
        now_s += later_s
        assert lines_read(cache, folders) == 0
    now_s += 30.0
    assert lines_read(cache, folders[:1]) == 0
    assert lines_read(cache, folders) == 8  # nobody had looked at the others


@patch("tailrace.dashboard.run_data._KEPT_BYTES", 1)
@patch("tailrace.dashboard.run_data._MOST_BYTES", 1)
def test_there_is_an_end_to_what_is_kept_of_runs_that_somebody_looks_at(folders: list[Path]) -> None:
    cache = RunCache(lambda: 0.0)
    assert lines_read(cache, folders) == 12
    assert lines_read(cache, folders) == 12
