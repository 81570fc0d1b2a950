"""Records of wandb's offline files: a log in LevelDB's format, of wandb's own messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32_768
_FILE_HEADER, _RECORD_HEADER = 7, 7
_FULL, _LAST = 1, 4


def read_records(path: Path) -> list[Any]:
    """All of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(data) for data in _payloads(path.read_bytes())]


def history(records: list[Any]) -> list[dict[str, Any]]:
    """What was logged, call by call."""
    return [_table(one.history.item) for one in records if one.HasField("history")]


def summary(records: list[Any]) -> dict[str, Any]:
    """What the summary was set to."""
    return _table(item for one in records if one.HasField("summary") for item in one.summary.update)


def config(records: list[Any]) -> dict[str, Any]:
    """The settings."""
    return _table(item for one in records if one.HasField("run") for item in one.run.config.update)


def _table(items: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = [item.key] if item.key else item.nested_key
        table = found
        for key in outer:
            table = table.setdefault(key, {})
        table[last] = json.loads(item.value_json)
    return found


def _payloads(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEADER, b""
    while place + _RECORD_HEADER <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _RECORD_HEADER:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + _RECORD_HEADER : place + _RECORD_HEADER + length]
        place += _RECORD_HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
