from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator

import pytest

from tailrace.reporting.phase_report import phase_line, total_costs
from tailrace.tracing.phase_totals import PhaseUsage, bucket_end_ns, duration_bucket
from tailrace.tracing.phases import OTHER, PhaseRecorder, phase
from tailrace.tracing.watched_tasks import WatchedCoroutine

MS = 1_000_000


class Time:
    """Passes only by work, and for everybody."""

    def __init__(self) -> None:
        self.now_ns = self.cpu_ns = 0

    def work(self, duration_ms: float, *, computing: float = 1.0) -> None:
        self.now_ns += int(duration_ms * MS)
        self.cpu_ns += int(duration_ms * MS * computing)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def recorder(time: Time) -> PhaseRecorder:
    return PhaseRecorder(clock_ns=lambda: time.now_ns, cpu_clock_ns=lambda: time.cpu_ns)


def held_ms(usage: dict[str, PhaseUsage]) -> dict[str, float]:
    return {name: round(used.held_s * 1e3, 6) for name, used in usage.items() if used.held_s}


async def test_a_phase_that_awaits_is_not_charged_for_what_others_do(recorder: PhaseRecorder, time: Time) -> None:
    has_worked = asyncio.Event()

    async def waits() -> None:
        with phase("waits"):
            time.work(1)
            await has_worked.wait()
            time.work(2)

    async def works() -> None:
        with phase("works"):
            time.work(50)
        has_worked.set()
        time.work(3)

    with recorder.recording():
        async with asyncio.TaskGroup() as group:
            group.create_task(waits())
            group.create_task(works())
    usage = recorder.flush()
    assert held_ms(usage) == {"waits": 3, "works": 50, OTHER: 3}
    assert usage["waits"].wall_s == pytest.approx(0.056)
    assert (usage["waits"].held_max_s, usage["works"].held_max_s) == (0.002, 0.05)


async def test_time_inside_a_nested_phase_is_the_nested_ones(recorder: PhaseRecorder, time: Time) -> None:
    async def rollout() -> None:
        with phase("rollout"):
            time.work(1)
            with phase("score") as score:
                time.work(20)
                await asyncio.sleep(0)
                time.work(4)
                score.add_bytes(512)
            time.work(2)

    with recorder.recording():
        await asyncio.create_task(rollout())
    usage = recorder.flush()
    assert held_ms(usage) == {"rollout": 3, "score": 24}
    assert (usage["rollout"].wall_s, usage["score"].wall_s) == (0.003, 0.024)
    assert (usage["rollout"].num_bytes, usage["score"].num_bytes) == (0, 512)


async def test_many_short_phases_of_one_turn_are_one_lag(recorder: PhaseRecorder, time: Time) -> None:
    async def slice_of_work() -> None:
        for _ in range(100):
            with phase("advantages"):
                time.work(0.5)

    with recorder.recording():
        await asyncio.create_task(slice_of_work())
    usage = recorder.flush()["advantages"]
    assert (usage.count, usage.held_max_s, usage.lag_s(0.5)) == (100, 0.05, 0.05)


async def test_children_are_charged_to_the_phase_that_started_them_until_it_ends(
    recorder: PhaseRecorder, time: Time
) -> None:
    may_go_on = asyncio.Event()

    async def child() -> None:
        time.work(5)
        await may_go_on.wait()
        time.work(7)

    async def parent() -> None:
        with phase("send"):
            left = asyncio.create_task(child())
            await asyncio.sleep(0)
        may_go_on.set()
        await left

    with recorder.recording():
        await asyncio.create_task(parent())
    assert held_ms(recorder.flush()) == {"send": 5, OTHER: 7}


async def test_threads_are_measured_and_hold_no_loop(recorder: PhaseRecorder, time: Time) -> None:
    def write() -> None:
        with phase("write", num_bytes=1000):
            time.work(30, computing=0.5)

    async def send() -> None:
        with phase("send"):
            time.work(1)
            await asyncio.to_thread(write)

    with recorder.recording():
        await asyncio.create_task(send())
    usage = recorder.flush()
    write_used = usage["write"]
    assert (write_used.wall_s, write_used.cpu_s, write_used.num_bytes) == (0.03, 0.015, 1000)
    assert "write" not in held_ms(usage)
    assert set(write_used.metrics("write")) == {
        f"phase/write/{key}" for key in ("wall_s", "cpu_s", "count", "moved_bytes")
    }
    assert usage["send"].wall_s == pytest.approx(0.001)


async def test_a_stretch_that_computes_nothing_is_no_cpu_time_however_short_those_before_were(
    recorder: PhaseRecorder, time: Time
) -> None:
    async def packs() -> None:
        for _ in range(20):
            with phase("pack"):
                time.work(0.1)
        with phase("pack"):
            time.work(1000, computing=0)

    with recorder.recording():
        await asyncio.create_task(packs())
    used = recorder.flush()["pack"]
    assert used.held_s == pytest.approx(1.002)
    assert 0.002 <= used.cpu_s < 0.005


async def test_a_long_stretch_is_charged_for_no_more_than_what_the_thread_computed_lately(
    recorder: PhaseRecorder, time: Time
) -> None:
    async def renders() -> None:
        for _ in range(1000):
            with phase("render"):
                time.work(0.1)
            await asyncio.sleep(0)
        with phase("pack"):
            time.work(1000, computing=0)
        with phase("advantages"):
            time.work(1000)

    with recorder.recording():
        await asyncio.create_task(renders())
    usage = recorder.flush()
    assert usage["render"].cpu_s == pytest.approx(0.1)
    assert usage["pack"].cpu_s < 0.006
    assert usage["advantages"].cpu_s == pytest.approx(1)


async def test_a_flush_starts_over(recorder: PhaseRecorder, time: Time) -> None:
    async def work() -> None:
        with phase("pack"):
            time.work(8)

    with recorder.recording():
        await asyncio.create_task(work())
        first = recorder.flush()
        assert recorder.flush() == {}
        await asyncio.create_task(work())
        assert recorder.flush() == first


async def test_nothing_is_recorded_outside(recorder: PhaseRecorder, time: Time) -> None:
    with recorder.recording():
        pass
    with phase("score") as score:
        score.add_bytes(1)
        time.work(1)
    assert recorder.flush() == {}


async def test_errors_and_cancellations_pass_and_end_the_phase(recorder: PhaseRecorder, time: Time) -> None:
    async def fails() -> None:
        with phase("fails"):
            raise KeyError("x")

    async def waits() -> None:
        with phase("waits"):
            await asyncio.Event().wait()

    with recorder.recording():
        with pytest.raises(KeyError, match="x"):
            await asyncio.create_task(fails())
        waiting = asyncio.create_task(waits())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert {name: used.count for name, used in recorder.flush().items() if used.count} == {"fails": 1, "waits": 1}


async def test_a_recorded_task_still_shows_where_it_waits(recorder: PhaseRecorder) -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    with recorder.recording():
        task = asyncio.create_task(inner(), name="mine")
        await asyncio.sleep(0)
        assert isinstance(task.get_coro(), WatchedCoroutine)
        assert "inner" in repr(task)
        assert [frame.f_code.co_name for frame in task.get_stack()] == ["inner"]
        assert "inner" in "".join(traceback.format_list(traceback.extract_stack(task.get_stack()[0])))
        task.cancel()


async def test_what_is_in_force_can_be_seen_while_it_holds_the_loop(recorder: PhaseRecorder, time: Time) -> None:
    seen: list[str] = []

    async def work() -> None:
        seen.append(recorder.in_force)
        with phase("score"):
            seen.append(recorder.in_force)
        seen.append(recorder.in_force)

    with recorder.recording():
        await asyncio.create_task(work())
    assert seen == [OTHER, "score", OTHER]


def durations() -> Iterator[int]:
    yield from (0, 1, 16_383, 16_384, 16_385)
    for octave in range(15, 40):
        yield from ((1 << octave) - 1, 1 << octave, (1 << octave) * 5 // 4, (1 << octave) * 7 // 4)


def test_a_bucket_ends_after_its_durations_and_at_most_a_quarter_later() -> None:
    buckets = [duration_bucket(duration_ns) for duration_ns in durations()]
    assert buckets == sorted(buckets)
    for duration_ns, bucket in zip(durations(), buckets, strict=True):
        assert duration_ns < bucket_end_ns(bucket) <= max(16_384, duration_ns * 1.25 + 1)


def test_the_line_of_a_step_begins_with_the_dearest_phase() -> None:
    metrics = {f"phase/p{place}/cpu_s": float(place) for place in range(1, 12)} | {"phase/p3/lag_max_s": 0.25}
    line = phase_line(metrics)
    assert line.startswith("p11 11.0 s CPU, 0 ms wall; p10")
    assert line.endswith("and 3 more")


def test_a_run_is_summed_up_phase_by_phase() -> None:
    lags_s = [0.1, 0.3, 0.2]
    steps = {
        "phase/score/cpu_s": [1.0] * 3,
        "phase/score/lag_p99_s": lags_s,
        "phase/score/lag_max_s": lags_s,
        "reward/mean": [9.0] * 3,
    }
    (cost,) = total_costs(steps)
    assert (cost.name, cost.values) == ("score", {"cpu_s": 3.0, "lag_p99_s": 0.2, "lag_max_s": 0.3})
