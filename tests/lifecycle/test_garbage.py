"""A collection is not begun by rollouts that start."""

from __future__ import annotations

import gc

import pytest

from tailrace.lifecycle.garbage import NEW_OBJECTS, OBJECTS_PER_ROLLOUT, hold_old_objects


@pytest.mark.parametrize(("in_flight", "threshold"), [(64, NEW_OBJECTS), (262_144, 262_144 * OBJECTS_PER_ROLLOUT)])
def test_a_collection_waits_for_more_objects_than_all_rollouts_in_flight_hold(in_flight: int, threshold: int) -> None:
    before = gc.get_threshold()
    with hold_old_objects(in_flight):
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold() == before
