"""The scheduler's states by step: there when a checkpoint names them, gone when none can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailrace.errors import CheckpointError
from tailrace.run.scheduler_states import SchedulerStates


@pytest.fixture
def states(tmp_path: Path) -> SchedulerStates:
    return SchedulerStates(tmp_path / "scheduler", tmp_path / "checkpoints")


def kept(states: SchedulerStates) -> list[str]:
    return sorted(path.name for path in states.path(0).parent.iterdir())


def test_a_state_is_read_as_it_was_written(states: SchedulerStates) -> None:
    states.write(3, b'{"of": 3}')
    states.write(3, b'{"of": "the same step again"}')
    assert states.read(3) == b'{"of": "the same step again"}'
    assert kept(states) == ["step_000003.json"]


def test_a_run_that_begins_has_none(states: SchedulerStates) -> None:
    assert states.read(0) == b""


def test_a_checkpoint_whose_state_is_gone_is_refused(states: SchedulerStates) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint of step 7 cannot be resumed without .*step_000007\.json"):
        states.read(7)


def test_states_stay_while_a_checkpoint_names_them_or_may_still_come(states: SchedulerStates, tmp_path: Path) -> None:
    for step in range(1, 6):
        states.write(step, b"{}")
    for folder in ("step_000002", ".writing_step_000003"):
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
    states.step_ended(4)
    states.write(6, b"{}")
    assert kept(states) == [f"step_{step:06d}.json" for step in (2, 3, 4, 5, 6)]


def test_states_ahead_of_a_run_that_was_resumed_go(states: SchedulerStates) -> None:
    for step in range(1, 6):
        states.write(step, b"{}")
    states.step_ended(2)
    states.write(3, b"{}")
    assert kept(states) == ["step_000002.json", "step_000003.json"]


def test_a_trainer_that_goes_on_before_all_states_is_refused_as_tasks_would_begin_anew(
    states: SchedulerStates, tmp_path: Path
) -> None:
    for step in range(1, 6):
        states.write(step, b"{}")
    states.step_ended(5)
    states.write(6, b"{}")
    resumed = SchedulerStates(tmp_path / "scheduler", tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"after step 3, and the oldest state in .*scheduler is of step 5"):
        resumed.read_newest(3)
    assert resumed.read_newest(0) == b""


def test_a_trainer_goes_on_with_the_newest_state_that_is_not_of_a_later_step(states: SchedulerStates) -> None:
    for step in (2, 4):
        states.write(step, b"%d" % step)
    assert [states.read_newest(step) for step in (2, 3, 4, 9)] == [b"2", b"2", b"4", b"4"]


def test_where_a_trainer_first_began_tasks_begin_again(states: SchedulerStates) -> None:
    assert states.read_newest(500) == b""
    states.write(501, b"{}")
    assert states.read_newest(500) == b""
    with pytest.raises(CheckpointError, match="is of step 500"):
        states.read_newest(499)


def test_a_trainer_that_trained_nothing_may_begin_earlier(states: SchedulerStates) -> None:
    states.read_newest(500)
    states.step_ended(400)
    assert states.read_newest(400) == b""
    assert kept(states) == ["step_000400.json"]


def test_states_of_a_run_without_a_checkpoint_are_listed_once(
    states: SchedulerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, listdir = list[Path](), os.listdir
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda folder: listed.append(folder) or listdir(folder))
        for step in range(1, 21):
            states.write(step, b"{}")
    assert len(listed) == 1
    assert len(kept(states)) == 20


def test_a_state_that_cannot_be_written_says_what_it_costs(states: SchedulerStates, tmp_path: Path) -> None:
    (tmp_path / "scheduler").write_text("no folder")
    with pytest.raises(CheckpointError, match="without which no checkpoint of step 1 can be resumed"):
        states.write(1, b"{}")
