"""A `metrics.jsonl` of many lines."""

from __future__ import annotations

from pathlib import Path

import msgspec

STEPS, METRICS = 2_000, 300


def write_long_metrics(path: Path) -> int:
    """Lines of `STEPS` steps with `METRICS` metrics each; the bytes of a line."""
    names = [f"phase/part_{number}/wall_s" for number in range(METRICS)]
    lines = [
        msgspec.json.encode({"step": step, "wall_s": 2.0 * step} | dict.fromkeys(names, step / 7)) + b"\n"
        for step in range(1, STEPS + 1)
    ]
    path.write_bytes(b"".join(lines))
    return len(lines[-1])
