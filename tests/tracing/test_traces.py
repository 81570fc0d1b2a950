from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from typing_extensions import override

from tailrace.tracing.phases import PhaseRecorder, phase
from tailrace.tracing.traces import TraceWriter, join_trace, remove_parts
from tailrace.tracing.wall_clock import monotonic_to_unix_ns
from tests.support.chrome_trace import crossings, read_trace, spans, tracks


async def _rollout(number: int, started: asyncio.Barrier) -> None:
    with phase("rollout", track="rollouts", about={"rollout": f"task-{number}"}):
        with phase("generate"):
            await started.wait()
        async with asyncio.TaskGroup() as tools:  # two at once
            for _ in range(2):
                tools.create_task(_call_tool())


async def _call_tool() -> None:
    with phase("tool"):
        await asyncio.sleep(0)


async def _record(folder: Path, *, rollouts: int = 4, max_bytes: int = 1_000_000) -> list[dict[str, object]]:
    trace = TraceWriter(folder / "parts", "orchestrator", max_bytes=max_bytes)
    with PhaseRecorder(trace).recording():
        started = asyncio.Barrier(rollouts)
        await asyncio.gather(*(asyncio.create_task(_rollout(number, started)) for number in range(rollouts)))
    trace.close()
    join_trace(folder / "parts", folder / "trace.json")
    return read_trace(folder / "trace.json")


async def test_what_overlaps_lies_in_lanes_and_in_a_lane_spans_nest(tmp_path: Path) -> None:
    events = await _record(tmp_path)
    assert tracks(events) == {"orchestrator": {"rollouts"}}
    assert len({span["tid"] for span in spans(events, "rollout")}) == 4
    assert len(spans(events, "tool")) == 8
    assert crossings(events) == []
    assert {span["args"]["rollout"] for span in spans(events, "rollout")} == {f"task-{n}" for n in range(4)}


async def test_a_span_that_was_raised_out_of_says_by_what(tmp_path: Path) -> None:
    async def plays(name: str, failure: Exception | None = None) -> None:
        with phase("rollout", track="rollouts", about={"rollout": name}):
            await asyncio.sleep(0)
            if failure is not None:
                raise failure
            await asyncio.sleep(0 if name == "ends" else 60)

    trace = TraceWriter(tmp_path / "parts", "orchestrator", max_bytes=100_000)
    with PhaseRecorder(trace).recording():
        playing = [asyncio.create_task(plays(*told)) for told in (("ends",), ("fails", KeyError("x")), ("waits",))]
        await asyncio.wait(playing[:2])
        playing[2].cancel()
        await asyncio.wait(playing)
    trace.close()
    join_trace(tmp_path / "parts", tmp_path / "trace.json")
    told = {span["args"]["rollout"]: span["args"].get("raised") for span in spans(read_trace(tmp_path / "trace.json"))}
    assert told == {"ends": None, "fails": "KeyError", "waits": "CancelledError"}


async def test_a_trace_keeps_to_its_size_and_tells_what_it_left_out(tmp_path: Path) -> None:
    events = await _record(tmp_path, rollouts=200, max_bytes=20_000)
    notes = [event for event in events if event["name"] == "trace_is_full"]
    assert (tmp_path / "trace.json").stat().st_size < 25_000
    assert len(notes) == 1


class _HeldTrace(TraceWriter):
    """Its disk takes nothing from the time on that `is_held` is set, until `released` is."""

    is_held, released = False, threading.Event()

    @override
    def _append(self, lines: bytes) -> None:
        assert not self.is_held or self.released.wait(60)
        super()._append(lines)


def test_what_a_slow_disk_does_not_take_is_counted_in_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = _HeldTrace(tmp_path / "parts", "generator", max_bytes=16_000_000)
    trace.is_held = True
    for number in range(25_600):
        trace.add_span("generate", "requests", 0, began_ns=number, duration_ns=1)
    trace.released.set()
    trace.close()
    join_trace(tmp_path / "parts", tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    (note,) = (event for event in events if event["name"] == "trace_is_full")
    assert 0 < len(spans(events)) < 25_600
    assert len(spans(events)) + note["args"]["dropped"] == 25_600
    assert "spans are left out of the trace" in caplog.text
    assert "sinks/dropped_records" not in caplog.text


class _CutTrace(TraceWriter):
    """Its disk has room for half of what it is given next once `cuts_next` is set, and then for everything again."""

    cuts_next = False

    @override
    def _append(self, lines: bytes) -> None:
        is_cut, self.cuts_next = self.cuts_next, False
        super()._append(lines[: len(lines) // 2] if is_cut else lines)
        if is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_a_full_disk_does_not_take_is_counted_in_the_trace_which_stays_whole(tmp_path: Path) -> None:
    trace = _CutTrace(tmp_path / "parts", "generator", max_bytes=1_000_000)
    trace.cuts_next = True
    for number in range(512):  # two writes
        trace.add_span("generate", "requests", 0, began_ns=number, duration_ns=1)
    trace.close()
    join_trace(tmp_path / "parts", tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    (note,) = (event for event in events if event["name"] == "trace_is_full")
    assert note["args"]["dropped"] == 256
    assert len(spans(events)) >= 256
    assert len([event for event in events if event["name"] == "thread_name"]) == 2  # the first may have been lost


def test_what_comes_after_the_end_of_a_trace_is_let_go_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = TraceWriter(tmp_path / "parts", "orchestrator", max_bytes=1_000_000)
    trace.add_span("train", "optimizer steps", 0, began_ns=time.monotonic_ns(), duration_ns=1)
    trace.close()
    with caplog.at_level(logging.DEBUG):
        trace.add_span("train", "optimizer steps", 0, began_ns=time.monotonic_ns() + 2 * 10**9, duration_ns=1)
        trace.add_value("event-loop lag", "ms", time.monotonic_ns(), 1.5)
        trace.flush()
        trace.close()
    assert caplog.text == ""
    join_trace(tmp_path / "parts", tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    assert len(spans(events)) == 1
    assert not [event for event in events if event["name"] == "trace_is_full"]


async def test_the_parts_of_all_processes_become_one_file(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    for role in ("orchestrator", "trainer"):
        trace = TraceWriter(parts, role, max_bytes=100_000)
        trace.add_span("train", "optimizer steps", 0, began_ns=5_000_000, duration_ns=2_500_000, about={"step": 1})
        trace.add_value("event-loop lag", "ms", 6_000_000, 1.5)
        trace.close()
    with (parts / "generator.events").open("w") as killed:
        killed.write('{"ph":"M","name":"process_name","pid":9,"args":{"name":"generator"}}\n{"ph":"X","na')
    join_trace(parts, tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["generator", "orchestrator", "trainer"]
    began_us = (5_000_000 + monotonic_to_unix_ns()) // 1_000
    assert [(span["ts"], span["dur"]) for span in spans(events)] == [(began_us, 2_500)] * 2
    assert len({span["pid"] for span in spans(events)}) == 2  # though one process wrote both
    assert not parts.exists()


def test_a_process_that_is_started_again_goes_on_with_its_part(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    for began_ns in (1_000_000, 2_000_000):
        trace = TraceWriter(parts, "trainer", max_bytes=100_000)
        trace.add_span("train", "optimizer steps", 0, began_ns=began_ns, duration_ns=500, about={"step": 1})
        trace.close()
        with (parts / "trainer.events").open("a") as killed:
            killed.write('{"ph":"X","name":"train","args":{"step":2}')  # cut short where it looks like an end
    full = TraceWriter(parts, "trainer", max_bytes=(parts / "trainer.events").stat().st_size)
    full.add_span("train", "optimizer steps", 0, began_ns=3_000_000, duration_ns=500)
    full.close()
    join_trace(parts, tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    first, second = spans(events)
    assert second["ts"] - first["ts"] == 1_000
    assert second["pid"] != first["pid"]  # also where a container gives both lives the same process id
    assert [event["name"] for event in events].count("trace_is_full") == 1


def test_a_file_of_somebody_else_beside_the_parts_is_left_and_hinders_nothing(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    TraceWriter(parts, "trainer", max_bytes=0).close()
    (parts / ".DS_Store").touch()
    join_trace(parts, tmp_path / "trace.json")
    remove_parts(parts)  # as the next start does
    assert [path.name for path in parts.iterdir()] == [".DS_Store"]


def test_a_trace_without_a_span_is_valid(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "parts", "trainer", max_bytes=0).close()
    join_trace(tmp_path / "parts", tmp_path / "trace.json")
    assert [event["name"] for event in read_trace(tmp_path / "trace.json")] == ["process_name", "process_labels"]
