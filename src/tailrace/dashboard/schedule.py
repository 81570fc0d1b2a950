"""Who did what when: swim-lanes of a stretch of time, the waterfall of a step, and what rollouts in flight wait for.

All of it comes from the trace; which step trained a rollout, and how old its tokens were, from the files of rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.dashboard.rollout_files import RolloutRow
from tailrace.dashboard.trace_spans import Spans, TraceSpans

_BUCKETS = 600
_MOST_ROLLOUTS = 240
"""Lanes of rollouts at once; with more, a page shows how many run."""
_MOST_SPANS = 4_000
_OLDEST = 60
_NEWEST_REQUESTS = 20_000
_FULL_AFTER_S = 60.0
"""Requests that much later than all that rollouts traced of themselves: their trace is full."""
_LEAST_SHARE = 0.004
"""Of a waterfall: what is shorter is no gap worth a name."""
_TRAINER = ("wait_for_batch", "train", "copy_state", "checkpoint", "publish")
_BATCHES = ("form_batch", "send_batch", "score_group")
_PARTS = ("environment", "generate", "score")

TRAINER_GAP = "the trainer reports the step"
REPLICA_GAP = "no request in flight"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a lane, in seconds since the trace's beginning."""

    name: str
    began_s: float
    ended_s: float
    number: int = -1
    """A step or a version."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One of a process: its spans, or how many requests it has."""

    name: str
    kind: str
    """`trainer`, `batches` or `replica`."""
    spans: list[Span] = []
    busy: list[int] = []
    """Requests in flight at each of the stretch's equal parts."""
    lag: list[tuple[float, int]] = []
    """From when on this replica's weights are so many versions behind the trainer's."""


class RolloutLane(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, from its beginning to the step that trained it."""

    rollout_id: str
    began_s: float
    ended_s: float
    parts: list[Span]
    queued_s: float = 0.0
    """Between its admission and its beginning."""
    step: int = -1
    trained_s: float | None = None
    """When the step that took it began."""
    reward: float | None = None
    staleness: float | None = None
    """Mean age of its tokens at that step, in versions."""
    outcome: str = ""


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """New weights came into use."""

    at_s: float
    version: int
    replica: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in flight that has not moved for a while."""

    rollout_id: str
    waits_for: str
    since_s: float
    """How long, at the end of the trace."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a run."""

    from_s: float
    to_s: float
    length_s: float
    """Of the whole trace."""
    lanes: list[Lane]
    swaps: list[Swap]
    rollouts: list[RolloutLane]
    num_rollouts: int
    """Those that reach into the stretch; their lanes are left out where there are too many."""
    steps: list[Span]
    waiting: list[Waiting]
    dropped: int
    """Spans that did not fit into the trace, or were too many to be shown."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a step's waterfall."""

    lane: str
    name: str
    began_s: float
    ended_s: float
    is_gap: bool = False
    depth: int = 0


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """A step, from the end of the one before it to its new weights in use."""

    step: int
    began_s: float
    length_s: float
    bars: list[Bar]
    steps: list[int]
    """Steps that the trace has."""


def schedule_of(
    trace: TraceSpans,
    from_s: float | None,
    to_s: float | None,
    rows_of: Callable[[Sequence[int]], list[RolloutRow]],
    waiting: list[Waiting],
) -> Schedule | None:
    """A stretch of the trace, in seconds since its beginning; None where it has nothing. `rows_of` tells of steps."""
    zero, end = trace.bounds()
    if end <= zero:
        return None
    start = zero + max(0.0, from_s or 0.0)
    stop = min(end, zero + to_s) if to_s is not None else end
    stop = max(stop, start + 1e-3)
    trained = trace.named("train")
    steps = _spans(trace, trace.within(trained, start, stop), zero)
    rollouts = trace.within(trace.named("rollout"), start, stop)
    lanes = [
        Lane(name=kind, kind=kind, spans=_lane(trace, names, start, stop, zero))
        for kind, names in (("trainer", _TRAINER), ("batches", _BATCHES))
    ]
    lanes += _replica_lanes(trace, start, stop, zero)
    shown = rollouts[:0] if len(rollouts) > _MOST_ROLLOUTS else rollouts
    rows = _rows(trace, rows_of, start, stop) if len(shown) else {}
    return Schedule(
        from_s=start - zero,
        to_s=stop - zero,
        length_s=end - zero,
        lanes=[lane for lane in lanes if lane.spans or lane.busy],
        swaps=[swap for swap in _swaps(trace, zero) if start - zero <= swap.at_s <= stop - zero][-_MOST_SPANS:],
        rollouts=_rollout_lanes(trace, shown, rows, zero),
        num_rollouts=len(rollouts),
        steps=steps[-_MOST_SPANS:],
        waiting=waiting,
        dropped=trace.dropped,
    )


def _spans(trace: TraceSpans, places: Spans, zero: float) -> list[Span]:
    numbers = trace.numbers[places].tolist()
    return [
        Span(name, began - zero, ended - zero, int(number))
        for name, (_, began, ended), number in zip(trace.name_of(places), trace.each(places), numbers, strict=True)
    ]


def _long_enough(trace: TraceSpans, places: Spans, least_s: float) -> Spans:
    """Without those that nobody could see, and the longest of too many."""
    lengths = trace.ended_s[places] - trace.began_s[places]
    seen = places[lengths >= least_s]
    if len(seen) > _MOST_SPANS:
        longest = np.argpartition(-(trace.ended_s[seen] - trace.began_s[seen]), _MOST_SPANS)[:_MOST_SPANS]
        seen = seen[np.sort(longest)]
    return seen


def _lane(trace: TraceSpans, names: Sequence[str], start: float, stop: float, zero: float) -> list[Span]:
    places = trace.within(trace.named(*names), start, stop)
    return _spans(trace, _long_enough(trace, places, (stop - start) / 4_000), zero)


def _requests(trace: TraceSpans) -> Spans:
    """Those of generators; where generation has no process of its own, what rollouts asked for."""
    requests = trace.named("request")
    return requests if len(requests) else trace.named("generate")


def _replica_lanes(trace: TraceSpans, start: float, stop: float, zero: float) -> list[Lane]:
    requests = _requests(trace)
    are_of_replicas = len(trace.named("request")) > 0
    edges = np.linspace(start, stop, _BUCKETS + 1)
    lanes = []
    for process in np.unique(trace.processes[requests]).tolist():
        own = requests[trace.processes[requests] == process]
        name = trace.process_names[int(process)]
        lanes.append(
            Lane(
                name=name,
                kind="replica",
                busy=_in_flight(trace, own, edges),
                lag=_lag(trace, name if are_of_replicas else None, start, stop, zero),
            )
        )
    return lanes


def _in_flight(trace: TraceSpans, places: Spans, edges: NDArray[np.float64]) -> list[int]:
    """[_BUCKETS]: of these spans, how many are open in the middle of each part."""
    middles = (edges[1:] + edges[:-1]) / 2
    began, ended = np.sort(trace.began_s[places]), np.sort(trace.ended_s[places])
    counts: list[int] = (np.searchsorted(began, middles) - np.searchsorted(ended, middles)).tolist()
    return counts


def _swaps(trace: TraceSpans, zero: float) -> list[Swap]:
    """By time: which version came into use where."""
    loads = trace.named("load_model_state_dict")
    found = [
        Swap(ended - zero, int(number), trace.texts.get(place, ""))
        for (place, _, ended), number in zip(trace.each(loads), trace.numbers[loads].tolist(), strict=True)
    ]
    return sorted(found, key=lambda swap: swap.at_s)


def _lag(trace: TraceSpans, replica: str | None, start: float, stop: float, zero: float) -> list[tuple[float, int]]:
    """When, within the stretch, a replica's weights fell how far behind the trainer's; None: those of any replica.

    A trainer that is started again publishes versions a second time.
    """
    published = trace.named("publish")
    versions = trace.numbers[published].tolist()
    changes = [
        (began - zero, False, version) for (_, began, _), version in zip(trace.each(published), versions, strict=True)
    ]
    swaps = [swap for swap in _swaps(trace, zero) if replica is None or swap.replica in ("", replica)]
    changes += [(swap.at_s, True, swap.version) for swap in swaps]
    found: list[tuple[float, int]] = []
    newest = installed = min(versions, default=1) - 1
    before = 0
    for at_s, is_swap, version in sorted(changes):
        if is_swap:
            installed = max(installed, version)
        else:
            newest = max(newest, version)
        lag = max(0, newest - installed)
        if at_s <= start - zero:
            before = lag
        elif at_s <= stop - zero:
            found.append((at_s, lag))
    return [(start - zero, before), *found][-_MOST_SPANS:]


def _rows(
    trace: TraceSpans, rows_of: Callable[[Sequence[int]], list[RolloutRow]], start: float, stop: float
) -> dict[str, RolloutRow]:
    """Rows of rollouts that steps in or shortly behind the stretch took."""
    trained = trace.named("train")
    inside = trained[trace.ended_s[trained] >= start]
    behind = inside[trace.began_s[inside] > stop][:6]
    chosen = np.concatenate([trace.within(inside, start, stop)[-24:], behind])
    return {row.rollout_id: row for row in rows_of([int(step) for step in trace.numbers[chosen].tolist()])}


def _rollout_lanes(
    trace: TraceSpans, rollouts: Spans, rows: Mapping[str, RolloutRow], zero: float
) -> list[RolloutLane]:
    if not len(rollouts):
        return []
    step_began = {
        int(step): began - zero
        for (_, began, _), step in zip(
            trace.each(trace.named("train")), trace.numbers[trace.named("train")].tolist(), strict=True
        )
    }
    parts = trace.within(
        trace.named(*_PARTS), float(trace.began_s[rollouts].min()), float(trace.ended_s[rollouts].max())
    )
    lanes = []
    for place, began, ended in trace.each(rollouts):
        own = (
            (trace.processes[parts] == trace.processes[place])
            & (trace.threads[parts] == trace.threads[place])
            & (trace.began_s[parts] >= began)
            & (trace.ended_s[parts] <= ended)
        )
        row = rows.get(trace.texts.get(place, ""))
        trained = row if row is not None and row.outcome.state == "trained" else None
        versions = None if trained is None else trained.versions
        lanes.append(
            RolloutLane(
                rollout_id=trace.texts.get(place, ""),
                began_s=began - zero,
                ended_s=ended - zero,
                parts=_spans(trace, parts[own], zero),
                queued_s=0.0 if row is None or not row.started_s else max(0.0, began - row.started_s),
                step=-1 if row is None else row.step,
                trained_s=None if trained is None else step_began.get(trained.step),
                reward=None if row is None else row.reward,
                staleness=None if trained is None or versions is None else trained.step - 1 - versions.mean,
                outcome="" if row is None else str(row.outcome.state),
            )
        )
    return lanes


def waiting_in(
    trace: TraceSpans, recorded: Collection[str], steps: Collection[int], *, released_early: bool = False
) -> list[Waiting]:
    """Rollouts that were seen and are in no step's file: what each waits for, the longest first.

    A rollout's own span is written when it ends, so that those in flight are known by their requests; where an agent
    worker did not live to write it, the orchestrator's tells of its end. `recorded` are those of the newest files,
    which hold all of these `steps`. One whose siblings are in flight waits for them, unless groups are
    `released_early`: it may have been trained long ago.
    """
    end = trace.bounds()[1]
    spans = trace.named("rollout", "wait_for_worker")
    ended = {trace.texts.get(place, ""): ended for place, _, ended in trace.each(spans)}
    gone = {trace.texts.get(place, "") for place in trace.raised}.union(recorded)
    in_flight = _in_flight_by_requests(trace, {*ended, *recorded})
    missing = Counter(map(_awaited, in_flight))
    found = [
        Waiting(
            rollout_id=rollout_id,
            waits_for=f"its environment, a tool or the next turn, since turn {turn} was generated",
            since_s=end - stopped,
        )
        for rollout_id, (stopped, turn) in in_flight.items()
    ]
    elsewhere_until_s = _recorded_elsewhere_until_s(trace, steps)
    for rollout_id, stopped in ended.items():
        if not rollout_id or rollout_id in gone:
            continue
        siblings, is_evaluation = missing[_awaited(rollout_id)], _is_of_evaluation(rollout_id)
        is_awaiting = siblings and (is_evaluation or not released_early)
        if is_awaiting or (stopped > elsewhere_until_s and not is_evaluation):
            waits_for = (
                "the rest of its evaluation"
                if is_evaluation
                else f"{siblings} more of its group"
                if siblings
                else "its group's scores, or its batch"
            )
            found.append(Waiting(rollout_id=rollout_id, waits_for=waits_for, since_s=end - stopped))
    return sorted(found, key=lambda one: -one.since_s)[:_OLDEST]


def _in_flight_by_requests(trace: TraceSpans, known: Collection[str]) -> dict[str, tuple[float, str]]:
    """Of rollouts that were seen and are not `known`: when the newest turn was generated, and which that is."""
    traced = trace.named("rollout", *_PARTS)
    full_at = trace.ended_s[traced].max(initial=0.0) + _FULL_AFTER_S
    found: dict[str, tuple[float, str]] = {}
    for place, _, stopped in trace.each(trace.named("request")[-_NEWEST_REQUESTS:]):
        rollout_id, _, turn = trace.texts.get(place, "").rpartition("/")
        rollout_id = rollout_id.rpartition("/")[0]
        if rollout_id and rollout_id not in known and stopped < full_at:
            found[rollout_id] = max(found.get(rollout_id, (0.0, "")), (stopped, turn))
    return found


def _recorded_elsewhere_until_s(trace: TraceSpans, steps: Collection[int]) -> float:
    """What ended until then may be in the file of another step, or was of one without a file."""
    ends = trace.named("train", "record")  # the second alone where the trainer is not ours
    numbers = trace.numbers[ends].tolist()
    others = [ended for (_, _, ended), step in zip(trace.each(ends), numbers, strict=True) if step not in steps]
    return max(others, default=0.0)


def _is_of_evaluation(rollout_id: str) -> bool:
    return rollout_id.startswith("eval-")


def _awaited(rollout_id: str) -> str:
    """What a rollout waits for the rest of: its group, or its evaluation.

    >>> _awaited("alphabet-sort/train/2051#231.0.0"), _awaited("eval-40/alphabet-sort/held-out/7#8.0")
    ('alphabet-sort/train/2051#231', 'eval-40')
    """
    return rollout_id.partition("/")[0] if _is_of_evaluation(rollout_id) else rollout_id.rsplit(".", 2)[0]


def waterfall_of(trace: TraceSpans, step: int | None) -> Waterfall | None:
    """One step's, or the newest's; None where the trace has no step."""
    trained = trace.named("train")
    numbers = [int(number) for number in trace.numbers[trained].tolist()]
    if not numbers:
        return None
    step = numbers[-1] if step is None or step not in numbers else step
    place = len(numbers) - 1 - numbers[::-1].index(step)
    began = float(trace.ended_s[trained[place - 1]]) if place else _first_wait(trace, trained[place])
    ended = float(trace.ended_s[trained[place]])
    published = trace.within(trace.named("publish", "load_model_state_dict"), ended, ended + 60)
    own = published[trace.numbers[published] == step]
    stop = min(max([ended, *trace.ended_s[own].tolist()]), ended + max(1.0, ended - began))
    zero, length_s = began, stop - began
    bars = [*_trainer_bars(trace, began, stop), *_batch_bars(trace, began, stop), *_replica_bars(trace, began, stop)]
    return Waterfall(
        step=step,
        began_s=began - trace.bounds()[0],
        length_s=length_s,
        bars=[
            msgspec.structs.replace(
                bar, began_s=max(0.0, bar.began_s - zero), ended_s=min(length_s, bar.ended_s - zero)
            )
            for bar in bars
        ],
        steps=sorted(set(numbers)),
    )


def _first_wait(trace: TraceSpans, first: int) -> float:
    waits = trace.named("wait_for_batch")
    before = waits[trace.began_s[waits] <= trace.began_s[first]]
    return float(trace.began_s[before[-1]]) if len(before) else float(trace.began_s[first])


def _trainer_bars(trace: TraceSpans, began: float, stop: float) -> list[Bar]:
    """Its phases, with what lies between them named."""
    places = trace.within(trace.named("wait_for_batch", "train", "copy_state"), began, stop)
    places = places[trace.ended_s[places] > began + 1e-6]
    bars = _bars(trace, places, "trainer")
    inside = trace.within(trace.named("gradients", "optimizer"), began, stop)
    bars = sorted([*_with_gaps(bars, began, stop, TRAINER_GAP)], key=lambda bar: bar.began_s)
    bars += [msgspec.structs.replace(bar, depth=1) for bar in _bars(trace, inside, "trainer")]
    return bars + _bars(trace, trace.within(trace.named("publish", "checkpoint"), began, stop), "trainer: weights")


def _batch_bars(trace: TraceSpans, began: float, stop: float) -> list[Bar]:
    return _bars(trace, trace.within(trace.named("form_batch", "send_batch"), began, stop), "batches")


def _replica_bars(trace: TraceSpans, began: float, stop: float) -> list[Bar]:
    requests = _requests(trace)
    bars = []
    for process in np.unique(trace.processes[requests]).tolist():
        own = trace.within(requests[trace.processes[requests] == process], began, stop)
        name = trace.process_names[int(process)]
        bars += _with_gaps(_joined(trace, own, name), began, stop, REPLICA_GAP)
    swaps = trace.within(trace.named("load_model_state_dict", "change_weights"), began, stop)
    return bars + _bars(trace, swaps, "new weights")


def _joined(trace: TraceSpans, places: Spans, lane: str) -> list[Bar]:
    """Spans that overlap as one."""
    bars: list[Bar] = []
    for _, began, ended in trace.each(places):
        if bars and began <= bars[-1].ended_s:
            bars[-1] = msgspec.structs.replace(bars[-1], ended_s=max(bars[-1].ended_s, ended))
        else:
            bars.append(Bar(lane=lane, name="requests in flight", began_s=began, ended_s=ended))
    return bars


def _bars(trace: TraceSpans, places: Spans, lane: str) -> list[Bar]:
    return [
        Bar(lane=lane, name=name, began_s=began, ended_s=ended)
        for name, (_, began, ended) in zip(trace.name_of(places), trace.each(places), strict=True)
    ][:_MOST_SPANS]


def _with_gaps(bars: Sequence[Bar], began: float, stop: float, name: str) -> list[Bar]:
    """These bars, and what lies between them where that is long enough to be asked about."""
    found, at = list[Bar](), began
    lane = bars[0].lane if bars else ""
    for bar in sorted(bars, key=lambda bar: bar.began_s):
        if bar.began_s - at > _LEAST_SHARE * (stop - began):
            found.append(Bar(lane=lane, name=name, began_s=at, ended_s=bar.began_s, is_gap=True))
        found.append(bar)
        at = max(at, bar.ended_s)
    return found
