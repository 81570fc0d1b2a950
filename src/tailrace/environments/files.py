"""Readers of data set files. Each gives rows by index and keeps no more in memory than it must."""

from __future__ import annotations

import importlib
import json
import os
from array import array
from pathlib import Path
from typing import Any

import msgspec

from tailrace.environments.rows import LazyRows, Row
from tailrace.errors import DataError, SettingsError
from tailrace.records import Json


class JsonlRows(LazyRows):
    """Rows of a JSONL file: the offsets of its lines in memory (8 bytes each), the lines on disk."""

    def __init__(self, path: Path, starts: array[int], line_numbers: array[int]) -> None:
        self._path = path
        self._starts = starts
        """Offset of every row's line, and the end of the file."""
        self._line_numbers = line_numbers
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self._line_numbers)

    def _row(self, position: int) -> Row:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        start, end = self._starts[position], self._starts[position + 1]
        return _decode_row(os.pread(self._file, end - start, start), self._path, self._line_numbers[position])

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def open_jsonl(path: Path) -> JsonlRows:
    """Index a JSONL file, checking every line. Raises `DataError` with file and line for one that is no JSON object."""
    starts, line_numbers, offset = array("q"), array("q"), 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                _decode_row(line, path, number)
                starts.append(offset)
                line_numbers.append(number)
            offset += len(line)
    starts.append(offset)
    return JsonlRows(path.resolve(), starts, line_numbers)


def _decode_row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}, line {number}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise DataError(f"{path}, line {number}: nests JSON too deep to be read") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a task row is a JSON object, not {_json_kind(row)}")
    return row


def _json_kind(value: Json) -> str:
    names: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class ArrowRows(LazyRows):
    """Rows of an Arrow table, turned into Python values one row at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _row(self, position: int) -> Row:
        rows: list[dict[str, Json]] = self._table.slice(position, 1).to_pylist()
        return rows[0]


def open_parquet(path: Path) -> ArrowRows:
    """A Parquet file, held in memory as columns. Raises `DataError` when it is none."""
    arrow = _import_pyarrow("pyarrow", "parquet")
    parquet = _import_pyarrow("pyarrow.parquet", "parquet")
    try:
        return ArrowRows(parquet.read_table(path, memory_map=True))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({error})") from error


def open_arrow_folder(folder: Path) -> ArrowRows:
    """A folder written by `datasets.Dataset.save_to_disk`: Arrow streams, mapped into memory.

    Raises `DataError` when it is none, or holds several splits (then name one: `folder/train`).
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").is_file())
        choices = " or ".join(f'"{folder / split}"' for split in splits)
        raise DataError(f"data set {folder} holds several splits; name one of them: {choices}")
    if not (folder / "state.json").is_file():
        raise DataError(f"{folder} is no data set: expected a folder written by `datasets.Dataset.save_to_disk`")
    arrow = _import_pyarrow("pyarrow", "datasets")
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(folder / name))).read_all() for name in names]
        return ArrowRows(arrow.concat_tables(tables))
    except (arrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data set folder {folder} is damaged ({error})") from error


def _import_pyarrow(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(f'reading this data set needs pyarrow: pip install "tailrace[{extra}]"') from error
