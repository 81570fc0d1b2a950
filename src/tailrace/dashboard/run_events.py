"""What happened to a run: its own events, and what its processes warned of."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from tailrace.dashboard.names import as_text
from tailrace.dashboard.tailing import Tail, last_lines
from tailrace.guards import decoded

_LOG_BYTES = 1 << 18
_MOST_EVENTS = 400
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (WARNING|ERROR|CRITICAL) +([\w.]+): (.*)", re.DOTALL)
_SHOWN = ("TrainerStarted", "StepSkipped", "CheckpointWritten", "StopRequested", "TrainerEnded")
"""Those that a list shows: a step and its weights are in the curves."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    kind: str
    """`TrainerStarted`, ..., `warning` or `error`."""
    text: str
    step: int | None = None
    at: str = ""
    """Local time of the run's machine, where it is known."""
    role: str = ""
    status: str = ""
    """How training ended, for `TrainerEnded`; how somebody asked that it ends, for `StopRequested`."""


class _Event(msgspec.Struct, frozen=True):
    """As much of `records.Event` as the list needs."""

    type: str
    step: int = 0
    version: int = 0
    reason: str = ""
    status: str = ""
    role: str = ""
    path: str = ""


_EVENT = msgspec.json.Decoder(_Event)


class EventList:
    """One run's, in order; the newest 400 of each source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / "events.jsonl")
        self._events: list[RunEvent] = []

    def update(self) -> list[RunEvent]:
        """All that there are now: the run's own, then the warnings of its logs."""
        if self._tail.start_over_if_replaced():
            self._events = []
        for line in self._tail.lines():
            event = decoded(_EVENT.decode, line)
            if event is not None and event.type in _SHOWN:
                self._events.append(_as_run_event(event))
        del self._events[:-_MOST_EVENTS]
        return self._events + _warnings(self._folder / "logs")


def _as_run_event(event: _Event) -> RunEvent:
    match event.type:
        case "TrainerStarted":
            text = f"trainer started at step {event.step:,} with policy version {event.version:,}"
        case "StepSkipped":
            text = f"step {event.step:,} changed nothing: {event.reason}"
        case "CheckpointWritten":
            text = f"checkpoint of step {event.step:,}: {event.path}"
        case "StopRequested":
            text = f"{event.role} asked for the end ({event.status}): {event.reason}"
        case _:
            text = f"training {event.status} at step {event.step:,}: {event.reason}"
    step = None if event.type == "StopRequested" else event.step
    return RunEvent(kind=event.type, text=text, step=step, role=event.role, status=event.status)


def _warnings(logs: Path) -> list[RunEvent]:
    """Of every process, by time."""
    found = []
    for path in sorted(logs.glob("*.log")):
        for line in last_lines(path, _LOG_BYTES):
            if (match := _LOG_LINE.match(line.decode("utf-8", "replace"))) is not None:
                at, level, _, text = match.groups()
                kind = "warning" if level == "WARNING" else "error"
                found.append(RunEvent(kind=kind, text=text[:2_000], at=at, role=as_text(path.stem)))
    return sorted(found, key=lambda event: event.at)[-_MOST_EVENTS:]
