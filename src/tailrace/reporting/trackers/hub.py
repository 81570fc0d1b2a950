"""The trackers of a run, as the observer sees them: each thing is encoded once, and sent to all. Never waits."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tailrace.records import Json
from tailrace.reporting.masking import masked
from tailrace.reporting.rollout_records import RolloutEntry, encode_line, rollout_record
from tailrace.reporting.settings import ObservabilitySettings
from tailrace.reporting.trackers.messages import Begin, Checkpoint, End, Histograms, Metrics, Rollouts, frame
from tailrace.reporting.trackers.process import TrackerProcess
from tailrace.reporting.trackers.protocol import Histogram, TrackedRun
from tailrace.reporting.trackers.registry import short_name

FOLDER = "trackers"
"""In a run's folder: what the trackers keep there."""
_BINS = 32
_TOO_LARGE = 1e300
"""For a histogram: between two values beyond it the distance may be infinite."""
_LINE_BYTES = 1_000_000
"""Of a rollout that is sent; longer ones are in the run's folder alone."""


class Trackers:
    """Those of a run; none does nothing."""

    def __init__(
        self, processes: Sequence[TrackerProcess] = (), *, rollouts: int = 0, rollouts_every_steps: int = 0
    ) -> None:
        """So many `rollouts` are sent every so many steps."""
        self._processes = processes
        self._rollouts, self._every_steps = rollouts, rollouts_every_steps
        self._summary = b""

    def logged(self, line: Mapping[str, float]) -> None:
        """A line of `metrics.jsonl`."""
        if self._processes:
            metrics = {name: float(value) for name, value in line.items() if name not in ("step", "wall_s")}
            self._send(frame(Metrics(int(line["step"]), line["wall_s"], metrics)))

    def ended(self, step: int, entries: Sequence[RolloutEntry], submit: Callable[[Callable[[], None]], bool]) -> None:
        """Rollouts ended with a step. `submit` runs what takes longer in a thread of its own."""
        if not self._processes or not entries:
            return
        values, samples = _values(entries), self._samples(step, entries)
        submit(lambda: self._send_rollouts(step, values, samples))

    def checkpoint_written(self, step: int, path: str) -> None:
        """It is whole."""
        if self._processes:
            self._send(frame(Checkpoint(step, path)))

    def summarise(self, summary: msgspec.Struct) -> None:
        """What the trackers are told at their end."""
        self._summary = msgspec.json.encode(summary)

    def metrics(self) -> dict[str, float]:
        """What did not reach each of them so far: a gauge of the run."""
        dropped = {f"tracker/{one.name}/dropped_records": float(one.dropped) for one in self._processes}
        return dropped | {f"tracker/{one.name}/failed_calls": float(one.failed) for one in self._processes}

    def close(self, timeout_s: float) -> None:
        """Wait until all have what waits, all of them together for so long. Blocks: call it off the event loop."""
        last, deadline_s = frame(End(self._summary)), time.monotonic() + timeout_s
        closing = [threading.Thread(target=one.close, args=(last, deadline_s)) for one in self._processes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _send(self, data: bytes) -> None:
        for process in self._processes:
            process.send(data)

    def _samples(self, step: int, entries: Sequence[RolloutEntry]) -> list[RolloutEntry]:
        """From the best reward to the worst, at even distances."""
        if not self._every_steps or step % self._every_steps or not self._rollouts:
            return []
        rewards = [(one.rollout.reward.value, -place) for place, one in enumerate(entries) if one.rollout.reward]
        ranked = [entries[-place] for _, place in sorted(rewards, reverse=True)]
        if len(ranked) <= self._rollouts:
            return ranked
        places = np.linspace(0, len(ranked) - 1, self._rollouts).round().astype(int)
        return [ranked[place] for place in places.tolist()]

    def _send_rollouts(self, step: int, values: Mapping[str, Sequence[float]], samples: Sequence[RolloutEntry]) -> None:
        histograms = {name: _histogram(found) for name, found in values.items() if found}
        if histograms:
            self._send(frame(Histograms(step, histograms)))
        lines = [encode_line(rollout_record(entry, step)) for entry in samples]
        if lines := [line for line in lines if len(line) <= _LINE_BYTES]:
            self._send(frame(Rollouts(step, lines)))


def _values(entries: Sequence[RolloutEntry]) -> dict[str, list[float]]:
    """Of each rollout one, by the names of their histograms."""
    rollouts = [entry.rollout for entry in entries]
    advantages = [float(np.mean(entry.advantage)) for entry in entries if entry.advantage is not None]
    found = {
        "histogram/reward": [rollout.reward.value for rollout in rollouts if rollout.reward is not None],
        "histogram/advantage": advantages,
        "histogram/completion_tokens": [float(rollout.num_completion_tokens) for rollout in rollouts],
        "histogram/duration_s": [max(0.0, rollout.ended_s - rollout.started_s) for rollout in rollouts],
    }
    return {name: [value for value in values if abs(value) < _TOO_LARGE] for name, values in found.items()}


def _histogram(values: Sequence[float]) -> Histogram:
    """Values that differ in their last digits alone get bins around them: no bins are narrow enough to lie between.

    >>> _histogram([0.3, 0.1 + 0.2]).counts[16]
    2
    """
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    room = max(0.5, 1e-6 * size) if high - low <= 1e-9 * max(size, sys.float_info.min) else 0.0
    counts, edges = np.histogram(np.asarray(values), bins=_BINS, range=(low - room, high + room))
    return Histogram(edges.tolist(), counts.tolist())


@contextlib.asynccontextmanager
async def open_trackers(
    chosen: ObservabilitySettings, *, name: str, run_folder: Path, settings: dict[str, Json], is_resumed: bool
) -> AsyncIterator[Trackers]:
    """Start their processes; on leaving, close them by the deadline. Raises `OSError` where the folder cannot be
    written."""
    if not chosen.trackers:
        yield Trackers()
        return
    processes = await asyncio.to_thread(_started, chosen, name, run_folder, settings, is_resumed)
    trackers = Trackers(
        processes, rollouts=chosen.tracker_rollouts, rollouts_every_steps=chosen.tracker_rollouts_every_steps
    )
    try:
        yield trackers
    finally:
        await asyncio.to_thread(trackers.close, chosen.tracker_close_s)


def _started(
    chosen: ObservabilitySettings, name: str, run_folder: Path, settings: dict[str, Json], is_resumed: bool
) -> list[TrackerProcess]:
    run_id, root = _run_id(run_folder / FOLDER), run_folder.absolute()
    processes: list[TrackerProcess] = []
    for tracker in chosen.trackers:
        short = short_name(tracker, [one.name for one in processes])
        folder = root / FOLDER / short
        folder.mkdir(parents=True, exist_ok=True)
        run = TrackedRun(
            name=name,
            run_id=run_id,
            project=chosen.tracker_project,
            run_folder=root,
            folder=folder,
            settings=masked(settings),
            is_resumed=is_resumed,
        )
        begin = Begin(
            tracker=tracker,
            run=run,
            log=root / "logs" / f"tracker-{short}.log",
            module_path=sys.path,
            close_s=chosen.tracker_close_s,
        )
        processes.append(TrackerProcess(short, begin, queue_records=chosen.queue_records))
    return processes


def _run_id(folder: Path) -> str:
    """The run's, made when it is first tracked."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run_id"
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:16], encoding="ascii")
    return path.read_text(encoding="ascii")
