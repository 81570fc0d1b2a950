"""Readers of data set files. Each gives rows by index and keeps no more in memory than it must."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from tailrace.environments.rows import LazyRows, Row
from tailrace.errors import DataError
from tailrace.extras import import_extra
from tailrace.records import DEEPEST, Json, is_too_deep

_TOO_DEEP = f"the row nests more than {DEEPEST} arrays and objects inside each other"
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)
_OPENING, _CLOSING = (b"[", b"{"), (b"]", b"}")


class JsonlRows(LazyRows):
    """Rows of a JSONL file: the offsets of its lines in memory (8 bytes each), the lines on disk."""

    def __init__(self, path: Path, starts: array[int], line_numbers: array[int], file: int | None = None) -> None:
        """`file` is a descriptor of the text where `path` holds it compressed; it is closed with the rows."""
        self._path = path
        self._starts = starts
        """Offset of every row's line, and the end of the file."""
        self._line_numbers = line_numbers
        self._file = file

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
    """Index a JSONL file, checking every line; a gzipped one is unpacked into a temporary file first.

    Raises `DataError` with file and line for a line that is no JSON object.
    """
    starts, line_numbers, offset = array("q"), array("q"), 0
    is_packed = path.suffix == ".gz"
    with _unpacked(path) if is_packed else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if text.strip():
                _decode_row(text, path, number)
                starts.append(offset + len(line) - len(text))
                line_numbers.append(number)
            offset += len(line)
        starts.append(offset)
        return JsonlRows(path.resolve(), starts, line_numbers, os.dup(lines.fileno()) if is_packed else None)


def open_json(path: Path) -> list[Row]:
    """A JSON file, plain or gzipped, that holds an array of objects; in memory. Raises `DataError` when it does not."""
    text = _read(path).removeprefix(BOM_UTF8)
    try:
        rows = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); one object a line belongs into a .jsonl file") from error
    except RecursionError as error:
        raise DataError(f"{path}, entry {_first_too_deep(text)}: {_TOO_DEEP}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds {_json_kind(rows)}; a data set is an array of objects")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, entry {number}: a task row is a JSON object, not {_json_kind(row)}")
        if is_too_deep(row):
            raise DataError(f"{path}, entry {number}: {_TOO_DEEP}")
    return rows


def _first_too_deep(text: bytes) -> int:
    """The first entry of an array of objects that nests too deep to be decoded."""
    depth, entry = 0, -1
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in _OPENING:
            depth += 1
            entry += depth == 2
            if depth > DEEPEST + 1:
                break
        elif found[0] in _CLOSING:
            depth -= 1
    return entry


def open_csv(path: Path) -> list[Row]:
    """A CSV file, plain or gzipped, whose first line names the columns; in memory, every value as text.

    Empty lines are no rows. Raises `DataError` with file and line for a row of another length.
    """
    try:
        text = _read(path).decode("utf-8-sig")
        with _csv_fields_of(len(text)):
            return _csv_rows(text, path)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8 ({error})") from error


@contextmanager
def _csv_fields_of(characters: int) -> Iterator[None]:
    """Read fields of so many characters meanwhile: `csv` has one limit for the process, of 131,072."""
    limit = csv.field_size_limit()
    csv.field_size_limit(max(limit, characters))
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _csv_rows(text: str, path: Path) -> list[Row]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns = next(lines, [])
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise DataError(f"{path}, line 1: {twice[0]!r} names more than one column; give each a name of its own")
    rows: list[Row] = []
    for values in filter(None, lines):
        if len(values) != len(columns):
            raise DataError(
                f"{path}, line {lines.line_num}: {len(values)} values for the {len(columns)} columns of line 1 "
                f"({', '.join(columns)})"
            )
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    with _unpacked(path) as file:
        return file.read()


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The text of a gzipped file, in a file that is gone afterwards. Raises `DataError` for a damaged one."""
    with tempfile.TemporaryFile() as file:
        try:
            with gzip.open(path) as packed:
                shutil.copyfileobj(packed, file)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is not a readable gzip file ({error})") from error
        file.seek(0)
        yield file


def _decode_row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}, line {number}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise DataError(f"{path}, line {number}: {_TOO_DEEP}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a task row is a JSON object, not {_json_kind(row)}")
    if line.count(b"[") + line.count(b"{") > DEEPEST and is_too_deep(row):
        raise DataError(f"{path}, line {number}: {_TOO_DEEP}")
    return row


def _json_kind(value: Json) -> str:
    names: dict[type, str] = {
        **{list: "an array", dict: "an object", str: "a string", bool: "a boolean"},
        type(None): "null",
    }
    return names.get(type(value), "a number")


class ArrowRows(LazyRows):
    """Rows of an Arrow table, turned into Python values one row at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._json = {field.name: field.type for field in table.schema if _holds_json(field.type)}
        """Types of the columns that hold texts of JSON: `Json` of `datasets`, for values of several types."""

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _row(self, position: int) -> Row:
        rows: list[dict[str, Json]] = self._table.slice(position, 1).to_pylist()
        row = rows[0]
        for name, kind in self._json.items():
            try:
                row[name] = _decoded(row[name], kind)
            except (msgspec.DecodeError, RecursionError) as error:
                raise DataError(f"row {position} of the data set: its column {name!r} is no JSON ({error})") from error
        return row


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _holds_json(kind: Any) -> bool:
    """Whether values of an Arrow type are texts of JSON, or hold some."""
    return _is_json(kind) or any(_holds_json(kind.field(number).type) for number in range(kind.num_fields))


def _decoded(value: Any, kind: Any) -> Json:
    """A value of that Arrow type, its texts of JSON decoded."""
    if _is_json(kind):
        return None if value is None else msgspec.json.decode(value)
    if isinstance(value, dict):
        return {name: _decoded(part, kind.field(name).type) for name, part in value.items()}
    if isinstance(value, list):
        return [_decoded(part, kind.field(0).type) for part in value]
    return value


def open_parquet(path: Path) -> ArrowRows:
    """A Parquet file, held in memory as columns. Raises `DataError` when it is none."""
    arrow = import_extra("pyarrow", extra="parquet", what="reading this data set")
    parquet = import_extra("pyarrow.parquet", extra="parquet", what="reading this data set")
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
    arrow = import_extra("pyarrow", extra="datasets", what="reading this data set")
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(folder / name))).read_all() for name in names]
        return ArrowRows(arrow.concat_tables(tables))
    except (arrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data set folder {folder} is damaged ({error})") from error


def open_hub(reference: str) -> Sequence[Row]:
    """A data set of the Hugging Face hub, `OWNER/NAME`, `OWNER/NAME/CONFIG` or either with `:SPLIT`; else `train`.

    Whatever `datasets` takes as a split works (`train[:1000]`). Raises `DataError` with what `datasets` says.
    """
    name, _, split = reference.partition(":")
    parts = name.split("/")
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise DataError(f"hub:{reference} names no data set; write hub:OWNER/NAME, hub:OWNER/NAME/CONFIG:SPLIT, ...")
    datasets = import_extra("datasets", extra="datasets", what="reading a data set of the hub")
    try:
        rows: Sequence[Row] = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split or "train")
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise DataError(f"hub:{reference} cannot be loaded: {type(error).__name__}: {said}") from error
    return rows
