"""When a role that ended early is started again."""

from __future__ import annotations

import pytest

from tailrace.config.restarts import RestartSettings
from tailrace.lifecycle.restarts import EarlyEnd, RestartHistory, restart_pause_s

SETTINGS = RestartSettings(per_role=3, window_s=100.0, backoff_s=2.0)


@pytest.mark.parametrize(
    ("earlier_s", "end", "pause_s"),
    [
        ([], EarlyEnd(50.0, has_worked=True), 0.0),
        ([], EarlyEnd(50.0, has_worked=True, by_itself=True), 0.0),
        ([49.0], EarlyEnd(50.0, has_worked=True), 2.0),
        ([48.0, 49.0], EarlyEnd(50.0, has_worked=True), 4.0),
        ([47.0, 48.0, 49.0], EarlyEnd(50.0, has_worked=True), None),
        ([47.0, 48.0, 149.0], EarlyEnd(150.0, has_worked=True), 2.0),
        ([], EarlyEnd(50.0, has_worked=False), 0.0),
        ([49.0], EarlyEnd(50.0, has_worked=False), None),
        ([], EarlyEnd(50.0, has_worked=False, by_itself=True), None),
    ],
    ids=[
        *("first", "failed after it worked", "second", "third", "too often", "the window has passed"),
        *("killed at the start", "killed at the start again", "failed at the start"),
    ],
)
def test_a_role_is_started_again_as_its_end_and_its_restarts_say(
    earlier_s: list[float], end: EarlyEnd, pause_s: float | None
) -> None:
    assert restart_pause_s(SETTINGS, earlier_s, end) == pause_s


def test_pauses_double_up_to_half_a_minute() -> None:
    history = RestartHistory(RestartSettings(per_role=8, window_s=1e6))
    pauses_s = [history.next_pause_s(EarlyEnd(float(time_s), has_worked=True)) for time_s in range(9)]
    assert pauses_s == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_nothing_is_started_again_where_no_restart_is_allowed() -> None:
    assert restart_pause_s(RestartSettings(per_role=0), [], EarlyEnd(0.0, has_worked=True)) is None
    assert restart_pause_s(RestartSettings(per_role=0), [], EarlyEnd(0.0, has_worked=False)) is None
