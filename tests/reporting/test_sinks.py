from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tailrace.records import (
    Completion,
    FinishReason,
    GroupId,
    Json,
    Outcome,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.records.branch import Branch
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import JsonlSink, RolloutWriter, read_jsonl, read_rollouts
from tailrace.tracing.background import BackgroundWriter

PATIENCE_S = 60.0


def a_rollout(row: dict[str, Json] | None = None, columns: dict[str, Json] | None = None) -> Rollout:
    branch = Branch()
    branch.extend_context([1, 2, 3])
    branch.extend_completion(
        Completion(
            token_ids=np.array([4, 5], np.int32),
            logprobs=np.array([-0.5, -1.5], np.float32),
            policy_versions=np.array([3, 4], np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    return Rollout(
        rollout_id=RolloutId("g0/0"),
        group_id=GroupId("g0"),
        task=Task(TaskId("sort/7"), "sort", 7, row or {"names": ["b", "a"], "answer": ["a", "b"]}),
        sampling=SamplingParams(temperature=0.7, max_tokens=32),
        branches=[branch],
        messages=[{"role": "user", "content": "sort"}, {"role": "assistant", "content": "a b"}],
        reward=Reward(0.5, components={"ratio": 0.8}, columns=columns or {"seen": 2}),
        turns=1,
        started_s=10.0,
        ended_s=12.5,
        metrics={"generate_s": 1.5},
    )


def test_a_rollout_file_holds_what_went_in_and_what_came_out(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    RolloutWriter(tmp_path, writer).write(12, [RolloutEntry(a_rollout(), Outcome.trained(12), advantage=1.25)])
    assert writer.close()
    (record,) = read_rollouts(tmp_path, 12)
    assert (tmp_path / "step_000012.jsonl").is_file()
    assert record.outcome == Outcome.trained(12)
    assert record.task == {"names": ["b", "a"], "answer": ["a", "b"]}
    assert (record.reward, record.reward_components, record.columns) == (0.5, {"ratio": 0.8}, {"seen": 2})
    assert record.versions is not None
    assert (record.versions.min, record.versions.max, record.versions.mean) == (3, 4, 3.5)
    assert (record.tokens, record.completion_tokens, record.mean_logprob) == (5, 2, -1.0)
    assert record.sampling["temperature"] == 0.7
    assert record.messages[1] == {"role": "assistant", "content": "a b"}
    assert (record.duration_s, record.advantage, record.metrics) == (2.5, 1.25, {"generate_s": 1.5})


def test_values_that_json_cannot_hold_cost_themselves_only(tmp_path: Path) -> None:
    circle: list[Json] = []
    circle.append(circle)
    rollouts = [
        a_rollout(
            {"array": np.arange(2), "number": np.float32(0.5), "object": {1, 2}, "path": Path("x"), "nan": math.nan}
        ),
        a_rollout({"surrogate": "\ud800"}),
        a_rollout({"circle": circle}),
        a_rollout({"huge": 2**80}),
    ]
    writer = BackgroundWriter()
    RolloutWriter(tmp_path, writer).write(1, [RolloutEntry(rollout, Outcome.trained(1)) for rollout in rollouts])
    assert writer.close()
    records = list(read_rollouts(tmp_path))
    assert len(records) == len(rollouts)
    assert records[0].task["array"] == [0, 1]
    assert records[0].task["nan"] is None
    assert "not_written" in records[2].columns
    assert all(record.reward == 0.5 for record in records)
    assert writer.failed == 0


class Row(dict[str, Json]):
    """A row that can be watched."""


class Teller:
    """Tells, when it is written, which of the rows are still there."""

    def __init__(self, rows: list[weakref.ref[Row]], told: list[int]) -> None:
        self._rows, self._told = rows, told

    def __repr__(self) -> str:
        self._told.append(sum(row() is not None for row in self._rows))
        return "told"


def test_a_rollout_is_let_go_of_once_it_is_written_and_no_later(tmp_path: Path) -> None:
    watched: list[weakref.ref[Row]] = []
    told: list[int] = []

    def entries() -> list[RolloutEntry]:
        rows = [Row(teller=Teller(watched, told)) for _ in range(3)]
        watched.extend(weakref.ref(row) for row in rows)
        return [RolloutEntry(a_rollout(row), Outcome.trained(1)) for row in rows]

    release, is_let_go = threading.Event(), threading.Event()
    writer = BackgroundWriter()
    writer.submit(release.wait)  # type: ignore[arg-type]
    RolloutWriter(tmp_path, writer).write(1, entries())
    last = watched[-1]()
    assert last is not None
    weakref.finalize(last, is_let_go.set)
    del last
    release.set()
    assert is_let_go.wait(PATIENCE_S)
    assert told == [3, 2, 1]
    assert writer.close()


def test_only_every_nth_step_is_written(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    rollouts = RolloutWriter(tmp_path, writer, every_steps=2)
    for step in range(1, 5):
        rollouts.write(step, [RolloutEntry(a_rollout(), Outcome.trained(step))])
    RolloutWriter(tmp_path, writer, every_steps=0).write(5, [RolloutEntry(a_rollout(), Outcome.trained(5))])
    assert writer.close()
    assert [record.step for record in read_rollouts(tmp_path)] == [2, 4]


def test_rollouts_are_read_in_the_order_of_their_steps(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    rollouts = RolloutWriter(tmp_path, writer)
    for step in (1_000_000, 999_999):
        rollouts.write(step, [RolloutEntry(a_rollout(), Outcome.trained(step))])
    assert writer.close()
    (tmp_path / "step_999999 copy.jsonl").write_bytes((tmp_path / "step_999999.jsonl").read_bytes())
    assert [record.step for record in read_rollouts(tmp_path)] == [999_999, 1_000_000]


def test_a_slow_disk_drops_and_counts_and_never_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    writer = BackgroundWriter(queue_records=2)
    writer.submit(release.wait)  # type: ignore[arg-type]
    sink = JsonlSink(tmp_path / "metrics.jsonl", writer)
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            sink.write({"step": step})
    assert writer.dropped in (8, 9)
    assert caplog.text.count("dropped") == 2  # one line, which names the metric too
    release.set()
    assert writer.close()
    assert len([*read_jsonl(tmp_path / "metrics.jsonl")]) == 10 - writer.dropped


def test_rollouts_that_wait_for_a_slow_disk_are_bounded_by_their_number(tmp_path: Path) -> None:
    release = threading.Event()
    writer = BackgroundWriter()
    writer.submit(release.wait)  # type: ignore[arg-type]
    rollouts, metrics = RolloutWriter(tmp_path, writer, waiting_rollouts=5), JsonlSink(tmp_path / "metrics", writer)

    def dropped_after(step: int, count: int) -> int:
        rollouts.write(step, [RolloutEntry(a_rollout(), Outcome.trained(step))] * count)
        return writer.dropped

    assert [dropped_after(1, 7), dropped_after(2, 1)] == [0, 1]  # one file is taken, however large
    metrics.write({"step": 1})  # metrics go on
    release.set()
    assert writer.close()
    assert writer.dropped == 1
    assert [record.step for record in read_rollouts(tmp_path)] == [1] * 7
    assert [*read_jsonl(tmp_path / "metrics")] == [{"step": 1}]


def test_what_the_disk_refused_makes_room_for_later_rollouts(tmp_path: Path) -> None:
    folder, turns = tmp_path / "rollouts", [threading.Event() for _ in range(2)]
    folder.write_text("not a folder")
    writer = BackgroundWriter()
    rollouts = RolloutWriter(folder, writer, waiting_rollouts=2)
    for step, turn in enumerate(turns, 1):
        rollouts.write(step, [RolloutEntry(a_rollout(), Outcome.trained(step))] * 2)
        assert writer.dropped == 0
        writer.submit(turn.set)
        assert turn.wait(60)
    assert writer.close()
    assert (writer.failed, writer.dropped) == (2, 0)


def test_a_failing_disk_is_logged_once_counted_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "rollouts"
    blocked.write_text("not a folder")
    writer = BackgroundWriter()
    rollouts, metrics = RolloutWriter(blocked, writer), JsonlSink(tmp_path / "metrics.jsonl", writer)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            rollouts.write(step, [RolloutEntry(a_rollout(), Outcome.trained(step))])
            metrics.write({"step": step})
        assert writer.close()
    assert writer.failed == 2
    assert caplog.text.count("could not be written") == 1
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_full_disk_does_not_raise() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    writer = BackgroundWriter()
    JsonlSink(full, writer).write({"step": 1})
    assert writer.close()
    assert writer.failed == 1


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    writer = BackgroundWriter()
    JsonlSink(path, writer).write({"step": 3, "training/loss": math.nan})
    assert writer.close()
    assert [*read_jsonl(path)] == [{"step": 1}, {"step": 3, "training/loss": None}]


def test_at_the_end_a_slow_disk_is_waited_for_as_long_as_it_finishes_what_it_is_given(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    metrics = JsonlSink(tmp_path / "metrics.jsonl", writer)
    for step in range(30):
        writer.submit(lambda: time.sleep(0.05))
        metrics.write({"step": step})
    assert writer.close(timeout_s=1.0)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(30)]


def test_at_an_end_that_is_in_a_hurry_a_slow_disk_is_waited_for_no_longer_than_it_may() -> None:
    writer = BackgroundWriter()
    for _ in range(100):
        writer.submit(lambda: time.sleep(0.02))
    writer.hurry(0.1)
    writer.close(timeout_s=1.0)
    assert writer.dropped > 0


def test_an_end_may_be_hurried_while_it_waits_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    release, writer = threading.Event(), BackgroundWriter()

    def hang() -> None:
        release.wait(2 * PATIENCE_S)

    writer.submit(hang)
    threading.Timer(0.1, writer.hurry, (0.1,)).start()
    assert not writer.close(timeout_s=PATIENCE_S)
    assert f"within {PATIENCE_S:.0f} s" not in caplog.text
    assert "what waits for it is dropped (1)" in caplog.text
    release.set()


def test_an_end_that_was_hurried_long_before_has_its_time_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, written, now_s = BackgroundWriter(), list[int](), 0.0
    monkeypatch.setattr("tailrace.tracing.background.time", SimpleNamespace(monotonic=lambda: now_s))
    writer.hurry(PATIENCE_S / 2)
    now_s = PATIENCE_S  # a callback that takes its time, roles that end
    for number in range(5):
        writer.submit(partial(written.append, number))
    assert writer.close(timeout_s=PATIENCE_S)
    assert (written, writer.dropped) == ([0, 1, 2, 3, 4], 0)


@pytest.mark.parametrize("queue_records", [3, 256], ids=["full", "with room"])
def test_at_the_end_what_waits_for_a_disk_that_hangs_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, queue_records: int
) -> None:
    begun, release, has_ended = (threading.Event() for _ in range(3))

    def hang() -> None:
        begun.set()
        release.wait()
        has_ended.set()

    writer = BackgroundWriter(queue_records=queue_records)
    writer.submit(hang)
    assert begun.wait(PATIENCE_S)
    metrics = JsonlSink(tmp_path / "metrics.jsonl", writer)
    for step in range(3):
        metrics.write({"step": step})
    assert writer.dropped == 0
    assert not writer.close(timeout_s=0.1)
    assert writer.dropped == 4
    assert "dropped (4)" in caplog.text
    release.set()
    assert has_ended.wait(PATIENCE_S)
    assert [*read_jsonl(tmp_path / "metrics.jsonl")] == []


def test_after_closing_records_are_counted_as_dropped(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    assert writer.close()
    JsonlSink(tmp_path / "metrics.jsonl", writer).write({"step": 1})
    assert writer.dropped == 1
    assert [*read_jsonl(tmp_path / "metrics.jsonl")] == []
