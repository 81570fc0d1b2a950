"""Exported tokens of a run's folder, to compare with."""

from __future__ import annotations

from pathlib import Path

import msgspec


def read_tokens(path: Path) -> list[dict[str, object]]:
    """The tokens of one file, a dict each."""
    if path.suffix == ".jsonl":
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    from pyarrow import parquet

    rows: list[dict[str, object]] = parquet.read_table(path).to_pylist()
    return rows
