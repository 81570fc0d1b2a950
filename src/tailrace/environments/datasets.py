"""Task rows from files, and the split into training and held-out rows."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tailrace.environments.files import open_arrow_folder, open_csv, open_hub, open_json, open_jsonl, open_parquet
from tailrace.environments.rows import AllBut, Row, RowView, SplitRows
from tailrace.errors import DataError, SettingsError

HUB = "hub:"
"""Begins the name of a data set of the Hugging Face hub."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_READERS: Mapping[str, Callable[[Path], Sequence[Row]]] = {
    ".jsonl": open_jsonl,
    ".ndjson": open_jsonl,
    ".json": open_json,
    ".csv": open_csv,
}
"""By the kind of file, plain or gzipped."""
_HELD_OUT_SEED = 20_000_003  # fixed, so that every run and every process holds out the same rows


def load_rows(path: str | Path) -> Sequence[Row]:
    """Task rows of a file, of a folder that Hugging Face `datasets` saved to disk, or of its hub (`hub:OWNER/NAME`).

    Files are `.jsonl`, `.json`, `.csv`, each plain or `.gz`, and `.parquet`; they must not change while the run lasts.
    Raises `DataError` where it is missing, unreadable, empty, malformed (with file and line) or of another kind,
    `SettingsError` without the extra that reads it.
    """
    if str(path).startswith(HUB):
        rows = open_hub(str(path).removeprefix(HUB))
    else:
        location = Path(os.path.expanduser(path))
        try:
            if not location.exists():
                may_be_id = _HUB_ID.fullmatch(str(path)) and location.suffix not in (*_READERS, ".gz", ".parquet")
                hint = f"; one of the Hugging Face hub is {HUB}{path}" if may_be_id else ""
                raise DataError(f"data set {location} does not exist (looked in {Path.cwd()}){hint}")
            rows = _open(location)
        except OSError as error:
            raise DataError(f"data set {location} cannot be read: {error.strerror or error}") from error
    if len(rows) == 0:
        raise DataError(f"data set {path} is empty: it has no task row")
    return rows


def first_rows(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """At most the first `count` rows, without fetching any."""
    return rows if count >= len(rows) else RowView(rows, range(count))


def hold_out(rows: Sequence[Row], count: int, *, name: str) -> tuple[Sequence[Row], Sequence[Row]]:
    """Split into training rows and `count` held-out ones: the same rows each time, spread over the whole, none in both.

    Held-out rows are in an order of chance, so that the first few of them are spread as well. Raises `DataError` where
    nothing would be left to train on, and `SettingsError` for rows that are one side of a split already.

    >>> train, held_out = hold_out([{"n": n} for n in range(10)], 3, name="digits")
    >>> len(train), len(held_out), {row["n"] for row in train} & {row["n"] for row in held_out}
    (7, 3, set())
    """
    if isinstance(rows, SplitRows):
        raise SettingsError(
            f"environment {name!r} holds questions out by their text, and of its training questions none may be: its "
            f"environment.args leave it no held-out task, where environment.eval_tasks asks for {count}. Ask for "
            "more tasks there, or give environment.eval_data",
            key=("eval_tasks",),
        )
    if count >= len(rows):
        raise DataError(
            f"environment {name!r} has {len(rows)} tasks and {count} are to be held out, which leaves none to train "
            "on; lower environment.eval_tasks or give environment.eval_data"
        )
    chosen = random.Random(_HELD_OUT_SEED).sample(range(len(rows)), count)
    return RowView(rows, AllBut(len(rows), chosen)), RowView(rows, chosen)


def _open(location: Path) -> Sequence[Row]:
    if location.is_dir():
        return open_arrow_folder(location)
    kind = Path(location.stem).suffix if location.suffix == ".gz" else location.suffix
    if (read := _READERS.get(kind)) is not None:
        return read(location)
    if location.suffix == ".parquet":
        return open_parquet(location)
    raise DataError(
        f"data set {location} is of no known kind; expected {', '.join(_READERS)} (each of them also as .gz), .parquet "
        "or a `datasets` folder"
    )
