"""Events of a run's file, to compare with."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from tailrace.errors import CorruptData
from tailrace.records import Event


def read_events(path: Path) -> list[Event]:
    """Every event of an `events.jsonl`, of all epochs; a torn last line is left out.

    Raises `CorruptData` for any other line that is no event. A metric that was not finite is NaN.
    """
    content = path.read_bytes()
    events: list[Event] = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            events.append(_decode_event(line))
        except msgspec.DecodeError as error:
            raise CorruptData(f"{path}, line {number} is not an event: {error}") from error
    return events


def _decode_event(line: bytes) -> Event:
    """JSON has no NaN: msgspec writes one as null, which is a NaN again here."""
    fields = msgspec.json.decode(line)
    metrics = fields.get("metrics") if isinstance(fields, dict) else None
    if isinstance(metrics, dict):
        fields["metrics"] = {name: math.nan if value is None else value for name, value in metrics.items()}
    event: Event = msgspec.convert(fields, Event)
    return event
