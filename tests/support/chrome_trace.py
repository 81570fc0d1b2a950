"""Chrome traces, checked against the JSON Schema beside this file and for what a schema can't say."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema

_SCHEMA = json.loads(Path(__file__).with_name("chrome_trace.schema.json").read_text())


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a valid trace."""
    trace = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)
    jsonschema.validate(trace, _SCHEMA)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], name: str | None = None) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and name in (None, event["name"])]


def tracks(events: list[dict[str, Any]]) -> dict[str, set[str]]:
    """The names of each process's tracks, without the lanes' numbers."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event["name"] == "thread_name":
            found[processes[event["pid"]]].add(event["args"]["name"].rpartition(" ")[0])
    return dict(found)


def crossings(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Spans of one lane that overlap without one lying in the other; viewers drop such."""
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for span in spans(events):
        lanes[span["pid"], span["tid"]].append(span)
    found = []
    for lane in lanes.values():
        around: list[dict[str, Any]] = []
        for span in sorted(lane, key=lambda span: (span["ts"], -span["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= span["ts"] + _ROUNDING_US:
                around.pop()
            if around and span["ts"] + span["dur"] > around[-1]["ts"] + around[-1]["dur"] + _ROUNDING_US:
                found.append((around[-1], span))
            around.append(span)
    return found


_ROUNDING_US = 0.01
