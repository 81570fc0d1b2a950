"""What goes to a tracker's process, and what comes back: frames of msgpack, each behind its length."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from tailrace.reporting.trackers.protocol import Histogram, TrackedRun

LATE = 75
"""Exit status of a process that ended itself by its deadline."""

_LENGTH_BYTES = 4


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first one."""

    tracker: str
    """A name or `module:attribute`."""
    run: TrackedRun
    log: Path
    """Takes what is printed in the process."""
    module_path: list[str]
    close_s: float
    """Time that it has to end, once the run has."""


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """See `Tracker.log`, as for all that follow."""

    step: int
    wall_s: float
    metrics: dict[str, float]


class Histograms(msgspec.Struct, frozen=True, tag=True):
    """Of one step."""

    step: int
    histograms: dict[str, Histogram]


class Rollouts(msgspec.Struct, frozen=True, tag=True):
    """Lines of a rollout file."""

    step: int
    lines: list[bytes]


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """By its path."""

    step: int
    path: str


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing comes after it."""

    summary: bytes
    """What `summary.json` says; empty where there is none."""


class TrackerReport(msgspec.Struct, frozen=True):
    """What comes back, as a line of JSON."""

    failed: int = 0
    """Calls that raised, so far."""
    why: str = ""
    """The newest one's error."""
    is_over: bool = False
    """The tracker could not be made."""


Message: TypeAlias = Metrics | Histograms | Rollouts | Checkpoint | End
decode_begin = msgspec.msgpack.Decoder(Begin, dec_hook=lambda kind, value: kind(value)).decode
decode_message = msgspec.msgpack.Decoder(Message).decode
decode_report = msgspec.json.Decoder(TrackerReport).decode


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # paths


def frame(message: Begin | Message) -> bytes:
    """As it goes through the pipe."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def read_frame(source: BinaryIO) -> bytes:
    """One message's body; empty where the pipe was closed, perhaps within a message."""
    length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    body = source.read(length)
    return body if len(body) == length else b""
