"""What readers of other libraries' files have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import xxhash

from tailrace.records import Json
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.sinks import Kind


@dataclass(frozen=True, slots=True)
class Placed:
    """A rollout, and whether it is one of a training step or of an evaluation; its record says of which."""

    kind: Kind
    record: RolloutRecord
    model: str = ""


def messages_of(value: Json, role: str) -> list[dict[str, Json]]:
    """A conversation, or a part of one: messages as they are, and text as a single one of a role."""
    if isinstance(value, list):
        return [_message(one) for one in value if isinstance(one, dict)]
    return [] if value is None or value == "" else [{"role": role, "content": value}]


def _message(message: Mapping[str, Json]) -> dict[str, Json]:
    """With its calls of tools in the form of OpenAI's, which the pages know."""
    calls = message.get("tool_calls")
    plain = {key: value for key, value in message.items() if value is not None}
    return {**plain, "tool_calls": [_call(call) for call in calls]} if isinstance(calls, list) else plain


def _call(call: Json) -> Json:
    if isinstance(call, str):  # JSON within JSON
        try:
            call = msgspec.json.decode(call)
        except msgspec.MsgspecError:
            return call
    if isinstance(call, dict) and "function" not in call and "name" in call:
        return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", "")}}
    return call


def finite(value: Json) -> float | None:
    """A number that JSON can say; None for what is none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def digest(value: object) -> str:
    """A short name for a task that has none.

    >>> digest("Sort: Ida, Tom") == digest("Sort: Ida, Tom") != digest("Sort: Tom, Ida")
    True
    """
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(value, order="deterministic"))[:10]
