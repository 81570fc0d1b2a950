from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tailrace.dashboard.run_data import RunData
from tailrace.dashboard.schedule import Bar
from tailrace.dashboard.trace_spans import TraceSpans
from tailrace.reporting.sinks import rollouts_path
from tailrace.tracing.traces import TraceWriter, join_trace
from tailrace.tracing.wall_clock import monotonic_to_unix_ns
from tests.support.made_runs import STEP_S, MadeRun


@pytest.fixture(params=[True, False], ids=["joined", "parts"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunData:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=request.param)
    return RunData(made.folder)


def test_a_stretch_has_its_lanes_swaps_and_rollouts(run: RunData) -> None:
    schedule = run.schedule(2.0, 5.0)
    assert schedule is not None
    assert [(lane.name, lane.kind) for lane in schedule.lanes] == [("trainer", "trainer"), ("generator", "replica")]
    trainer, generator = schedule.lanes
    assert {span.name for span in trainer.spans} == {"wait_for_batch", "train", "publish"}
    assert max(generator.busy) == 12
    assert all(2.0 <= swap.at_s <= 5.0 for swap in schedule.swaps)
    assert [swap.version for swap in schedule.swaps] == [1, 2]
    assert schedule.num_rollouts == len(schedule.rollouts) > 12


def test_a_replica_is_behind_by_the_versions_that_were_published(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=False)
    trainer = made.folder / "trace" / "trainer.events"
    for step in (5, 6):  # of a trainer that was started again
        _append_span(trainer, "train", 110.0 + step, f'"step":{step}')
        _append_span(trainer, "publish", 110.5 + step, f'"version":{step}')
    _append_span(trainer, "train", 118.0, '"step":7')  # a step that was skipped
    assert _lags(made) == {"generator": (1, 0)}


def test_where_generation_has_no_process_of_its_own_the_weights_of_any_replica_count(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=False)
    (made.folder / "trace" / "generator.events").unlink()
    assert _lags(made) == {"orchestrator": (1, 0)}


def _lags(made: MadeRun) -> dict[str, tuple[int, int]]:
    """By how many versions each lane of requests is behind, at most and at last."""
    schedule = RunData(made.folder).schedule(None, None)
    assert schedule is not None
    lanes = {lane.name: [behind for _, behind in lane.lag] for lane in schedule.lanes if lane.kind == "replica"}
    return {name: (max(behind), behind[-1]) for name, behind in lanes.items()}


def test_a_rollout_knows_its_parts_its_step_and_how_old_its_tokens_were(run: RunData) -> None:
    schedule = run.schedule(0.0, 4.0)
    assert schedule is not None
    rollout = next(one for one in schedule.rollouts if one.rollout_id == "sort/train/200#2.0.0")
    assert [part.name for part in rollout.parts] == ["environment", "generate"]
    assert (rollout.step, rollout.outcome) == (2, "trained")
    assert rollout.staleness == 1.0  # sampled by version 0, trained by step 2
    assert rollout.queued_s == pytest.approx(0.05, abs=1e-3)
    assert rollout.trained_s is not None
    assert rollout.trained_s > rollout.ended_s
    filtered = next(one for one in schedule.rollouts if one.rollout_id == "sort/train/202#2.0.0")
    assert (filtered.outcome, filtered.staleness) == ("filtered", None)


def test_a_waterfall_names_what_everybody_waited_for(run: RunData) -> None:
    waterfall = run.waterfall(3)
    assert waterfall is not None
    assert (waterfall.step, waterfall.steps) == (3, [1, 2, 3, 4, 5, 6])

    def took(bars: list[Bar]) -> float:
        return sum(bar.ended_s - bar.began_s for bar in bars)

    waits = [bar for bar in waterfall.bars if bar.name == "wait_for_batch"]
    assert took(waits[:1]) == pytest.approx(0.3, abs=0.01)
    trains = [bar for bar in waterfall.bars if bar.name == "train"]
    assert took(trains) == pytest.approx(STEP_S - 0.35, abs=0.01)
    idle = [bar for bar in waterfall.bars if bar.is_gap and bar.lane == "generator"]
    assert {bar.name for bar in idle} == {"no request in flight"}
    assert all(0 <= bar.began_s <= bar.ended_s <= waterfall.length_s for bar in waterfall.bars)


def test_a_rollout_in_flight_says_what_it_waits_for(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=False)
    for request in ("sort/train/900#9.0.0/0/2", "sort/train/901#9.1.0/0/1"):
        _append_span(made.folder / "trace" / "generator.events", "request", 109.5, f'"request":"{request}"')
    schedule = RunData(made.folder).schedule(None, None)
    assert schedule is not None
    assert {one.rollout_id: one.waits_for.split(",")[0] for one in schedule.waiting} == {
        "sort/train/900#9.0.0": "its environment",
        "sort/train/901#9.1.0": "its environment",
    }


def test_a_rollout_whose_worker_was_lost_is_in_flight_no_longer(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=False)
    lost = "sort/train/900#9.0.0"
    _append_span(made.folder / "trace" / "generator.events", "request", 109.4, f'"request":"{lost}/0/1"')
    _append_span(made.folder / "trace" / "orchestrator.events", "wait_for_worker", 109.5, f'"rollout":"{lost}"')
    schedule = RunData(made.folder).schedule(None, None)
    assert schedule is not None
    assert not any(one.waits_for.startswith("its environment") for one in schedule.waiting)


def _waiting(made: MadeRun) -> dict[str, str]:
    schedule = RunData(made.folder).schedule(None, None)
    assert schedule is not None
    return {one.rollout_id: one.waits_for for one in schedule.waiting}


@pytest.mark.parametrize("every_steps", [0, 1, 10])
def test_what_has_ended_waits_where_no_file_can_have_it(tmp_path: Path, every_steps: int) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=25)
    made.write_steps(25)
    made.write_trace(joined=False)
    paths = {step: rollouts_path(made.folder / "rollouts", step) for step in range(1, 26)}
    for step, path in paths.items():
        if not every_steps or step % every_steps:
            path.unlink()
    if every_steps == 1:  # of a group that was trained in step 25 one ended long before
        first, rest = paths[1].read_bytes().split(b"\n", 1)
        paths[1].write_bytes(rest)
        paths[25].write_bytes(paths[25].read_bytes() + first + b"\n")
    assert _waiting(made) == {}
    last_s = 100 + 27 * STEP_S
    for name, about in (("train/9#30.0.0", ""), ("train/9#30.1.0", ',"raised":"CancelledError"')):
        told = f'"rollout":"sort/{name}"{about}'
        _append_span(made.folder / "trace" / "orchestrator.events", "rollout", last_s + 0.1, told)
    assert _waiting(made) == {"sort/train/9#30.0.0": "its group's scores, or its batch"}


@pytest.mark.parametrize("group_release", ["together", "early"])
def test_a_sibling_of_what_is_in_flight_waits_unless_it_may_have_been_trained(
    tmp_path: Path, group_release: str
) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=25, settings={"scheduling": {"group_release": group_release}})
    made.write_steps(25)
    made.write_trace(joined=False)
    last_s = 100 + 27 * STEP_S
    told = '"request":"sort/train/100#1.4.0/0/1"'  # the fifth of a group of which four were trained in step 1
    _append_span(made.folder / "trace" / "generator.events", "request", last_s, told)
    new = '"rollout":"sort/train/9#30.0.0"'
    _append_span(made.folder / "trace" / "orchestrator.events", "rollout", last_s + 0.1, new)
    waiting = {rollout_id: waits_for.split(",")[0] for rollout_id, waits_for in _waiting(made).items()}
    assert waiting.pop("sort/train/100#1.4.0") == "its environment"
    assert waiting.pop("sort/train/9#30.0.0") == "its group's scores"
    siblings = {f"sort/train/100#1.{member}.0": "1 more of its group" for member in range(4)}
    assert waiting == ({} if group_release == "early" else siblings)


def test_a_file_that_is_read_in_part_does_not_make_the_rest_of_its_rollouts_wait(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=False)
    made.write_large_file(6, 8_193)
    assert _waiting(made) == {}


def test_an_evaluation_waits_while_one_of_its_rollouts_is_in_flight(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(6)
    made.write_trace(joined=False)
    parts = made.folder / "trace"
    for number in range(2):
        told = f'"rollout":"eval-6/sort/held-out/{number}#{number}.0"'
        _append_span(parts / "orchestrator.events", "rollout", 113.0, told)
    assert _waiting(made) == {}  # observability.rollouts_every_steps is 0, say: it is in no file
    _append_span(parts / "generator.events", "request", 113.5, '"request":"eval-6/sort/held-out/2#2.0/0/1"')
    assert [waits_for.split(",")[0] for waits_for in _waiting(made).values()] == [
        "the rest of its evaluation",
        "the rest of its evaluation",
        "its environment",
    ]


def _append_span(part: Path, name: str, ended_s: float, about: str = "") -> None:
    """Of half a second, as `TraceWriter` writes one."""
    with part.open("a") as file:
        file.write(
            f'{{"ph":"X","name":"{name}","cat":"made","pid":{_number_of(part)},"tid":1,'
            f'"ts":{_unix_us(ended_s - 0.5)},"dur":500000,"args":{{{about}}}}},\n'
        )


def _number_of(part: Path) -> int:
    """The number that a part's process has in the trace."""
    number: int = json.loads(part.read_text().splitlines()[1])["pid"]
    return number


def _unix_us(monotonic_s: float) -> int:
    return int(monotonic_s * 1e6) + monotonic_to_unix_ns() // 1000


def test_rollouts_in_flight_are_known_while_none_ends(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_trace(joined=False)  # no rollout has ended
    parts = made.folder / "trace"

    def waiting() -> dict[str, float]:
        schedule = RunData(made.folder).schedule(None, None)
        assert schedule is not None
        return {one.rollout_id: one.since_s for one in schedule.waiting}

    for ended_s, rollout_id in ((300.0, "sort/train/900#9.0.0"), (500.0, "sort/train/901#9.1.0")):
        _append_span(parts / "generator.events", "request", ended_s, f'"request":"{rollout_id}/0/1"')
        _append_span(parts / "orchestrator.events", "generate", ended_s)
    assert waiting() == {"sort/train/900#9.0.0": 200.0, "sort/train/901#9.1.0": 0.0}
    _append_span(parts / "generator.events", "request", 600.0, '"request":"sort/train/902#9.2.0/0/1"')
    assert set(waiting()) == {"sort/train/900#9.0.0", "sort/train/901#9.1.0"}  # of the last nobody could see the end


def test_machines_started_at_other_times_with_equal_process_ids_stand_beside_each_other(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run")
    up_s = {"orchestrator": 30 * 86_400, "trainer": 100, "generator_0": 5_000, "generator_1": 9_000}
    for name, began_s in up_s.items():
        clock = patch("tailrace.tracing.traces.monotonic_to_unix_ns", return_value=(1_700_000_000 - began_s) * 10**9)
        with clock, patch("os.getpid", return_value=7):
            trace = TraceWriter(made.folder / "trace", name, max_bytes=100_000)
        span = {"orchestrator": "rollout", "trainer": "train"}.get(name, "request")
        trace.add_span(span, "made", 0, began_ns=began_s * 10**9, duration_ns=2 * 10**9, about={"step": 1})
        trace.close()
    join_trace(made.folder / "trace", made.folder / "trace.json")
    schedule = RunData(made.folder).schedule(None, None)
    assert schedule is not None
    assert schedule.length_s == pytest.approx(2.0)
    assert [lane.name for lane in schedule.lanes] == ["trainer", "generator_0", "generator_1"]


def test_where_there_are_too_many_spans_every_process_keeps_its_share(run: RunData) -> None:
    every = TraceSpans(run.folder)
    every.update()
    by_process = np.bincount(every.processes)
    orchestrator, trainer = (every.process_names.index(name) for name in ("orchestrator", "trainer"))
    assert by_process[orchestrator] > 3 * by_process[trainer]
    most = int(by_process.sum() * 2 // 3)
    with (
        patch("tailrace.dashboard.trace_spans._MOST_SPANS", most),
        patch("tailrace.dashboard.trace_spans._KEPT_SPANS", most * 3 // 4),
    ):
        shown = TraceSpans(run.folder)
        shown.update()
    assert most / 2 < len(shown) <= most
    assert shown.dropped == len(every) - len(shown)
    kept = np.bincount(shown.processes)
    assert kept[trainer] == by_process[trainer]
    assert 0 < kept[orchestrator] < by_process[orchestrator]
    for number, count in enumerate(kept):  # each has its first ones, with what is told of them
        first, same = (np.flatnonzero(one.processes == number)[:count] for one in (every, shown))
        assert every.began_s[first].tolist() == shown.began_s[same].tolist()
        assert [every.texts.get(place) for place in first] == [shown.texts.get(place) for place in same]
    assert shown.named("rollout").size


def test_without_a_trace_there_is_nothing_to_show(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run")
    made.write_steps(1)
    (made.folder / "trace.json").write_text('{"displayTimeUnit":"ms","traceEvents":[\n]}\n')
    run = RunData(made.folder)
    assert run.schedule(None, None) is None
    assert run.waterfall(None) is None


def test_numbers_that_no_column_holds_cost_their_line_alone(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run")
    made.write_steps(3)
    made.write_trace(joined=False)
    (part, *_) = sorted((made.folder / "trace").glob("*.events"))
    with part.open("a") as file:
        for impossible in ('"tid": -1', '"tid": 4294967296', '"args": {"step": 1e10}', '"args": {"step": 2147483648}'):
            file.write(f'{{"ph": "X", "name": "train", "pid": 1, "ts": 1, "dur": 1, {impossible}}},\n')
    found = RunData(made.folder).waterfall(None)
    assert found is not None
    assert found.steps == [1, 2, 3]


def test_a_trace_that_grows_is_followed_and_its_joining_changes_nothing(tmp_path: Path) -> None:
    made = MadeRun(folder=tmp_path / "run", steps=6)
    made.write_steps(3)
    made.write_trace(joined=False)
    run = RunData(made.folder)
    before = run.schedule(None, None)
    trainer = made.folder / "trace" / "trainer.events"
    _append_span(trainer, "train", 107.9, '"step":4')
    with trainer.open("a") as file:
        file.write('{"ph":')  # cut short
    after = run.schedule(None, None)
    assert before is not None
    assert after is not None
    assert [span.number for span in after.steps] == [*(span.number for span in before.steps), 4]
