"""A collection is not begun by rollouts that start, nor by imports."""

from __future__ import annotations

import gc
import importlib
from contextlib import nullcontext
from pathlib import Path

import pytest

from tailrace.lifecycle.garbage import NEW_OBJECTS, OBJECTS_PER_ROLLOUT, hold_old_objects, import_large


@pytest.mark.parametrize(("in_flight", "threshold"), [(64, NEW_OBJECTS), (262_144, 262_144 * OBJECTS_PER_ROLLOUT)])
def test_a_collection_waits_for_more_objects_than_all_rollouts_in_flight_hold(in_flight: int, threshold: int) -> None:
    before = gc.get_threshold()
    with hold_old_objects(in_flight):
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold() == before


def test_objects_that_somebody_else_holds_stay_so() -> None:
    gc.freeze()
    held = gc.get_freeze_count()
    with hold_old_objects():
        pass
    assert gc.get_freeze_count() >= held


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for_while_a_large_module_is_imported_and_again_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    name = f"large_module_{fails}"
    source = f"import gc\nlooks = gc.isenabled()\nif {fails}:\n    raise ImportError(looks)\n"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="False") if fails else nullcontext():
        import_large(name)
        assert importlib.import_module(name).looks is False
    assert gc.isenabled()
