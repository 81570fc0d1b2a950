"""Rows come from files by index, and a file that is no data set says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.environments import load_rows
from tailrace.environments.datasets import hold_out
from tailrace.errors import DataError, SettingsError

ROWS: list[dict[str, Any]] = [
    {"prompt": "näher", "answer": 1, "names": ["a", "b"]},
    {"prompt": "b", "answer": 2, "names": []},
    {"prompt": "c", "answer": None, "names": ["z"]},
]


def write_jsonl(path: Path) -> Path:
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))
    return path


def write_parquet(path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    return path


def write_saved_dataset(folder: Path) -> Path:
    """What `datasets.Dataset.save_to_disk(folder, num_shards=2)` writes."""
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    schema = arrow.Table.from_pylist(ROWS).schema
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, [ROWS[:2], ROWS[2:]], strict=True):
        with arrow.OSFile(str(folder / name), "wb") as sink, arrow.ipc.new_stream(sink, schema) as writer:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("write", "name"), [(write_jsonl, "d.jsonl"), (write_parquet, "d.parquet"), (write_saved_dataset, "d")]
)
def test_every_kind_of_data_set_gives_the_same_rows(write: Any, name: str, tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path / name))
    assert len(rows) == 3
    assert [rows[index] for index in (2, 0, -1)] == [ROWS[2], ROWS[0], ROWS[2]]
    assert list(rows) == ROWS
    assert list(rows[1:]) == ROWS[1:]
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n  \n", "is empty"),
        ('{"a": 1}\n\n{"a": \n', "broken.jsonl, line 3: not valid JSON"),
        ('{"a": 1}\n[1]\n', "line 2: a task row is a JSON object, not an array"),
        ('{"a": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 2: nests JSON too deep"),
        ('"hello"\n', "line 1: a task row is a JSON object, not a string"),
    ],
)
def test_a_bad_jsonl_file_is_refused_with_file_and_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"broken\.jsonl") as caught:
        load_rows(tmp_path / "broken.jsonl")
    assert says in str(caught.value)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xe4"}\n')
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        load_rows(tmp_path / "latin.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        load_rows(tmp_path / "nowhere.jsonl")


def test_an_unknown_kind_of_file_says_which_are_known(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"no known kind; expected \.jsonl, \.parquet"):
        load_rows(tmp_path / "rows.csv")


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load_rows(tmp_path / "rows.parquet")


def test_a_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "d" / "train")
    write_saved_dataset(tmp_path / "d" / "test")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r'several splits; name one of them: ".*/d/test" or ".*/d/train"'):
        load_rows(tmp_path / "d")
    assert len(load_rows(tmp_path / "d" / "train")) == 3


def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no data set"):
        load_rows(tmp_path)


def test_a_saved_data_set_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "d")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="is damaged"):
        load_rows(folder)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r'pip install "tailrace\[parquet\]"'):
        load_rows(path)


class Untouchable:
    """Rows that count how often they are fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        self.fetched += 1
        return {"n": index}


def test_holding_tasks_out_of_a_huge_sequence_fetches_none() -> None:
    rows = Untouchable(10**9)
    train, held_out = hold_out(rows, 100, name="huge")  # type: ignore[arg-type]
    assert (len(train), len(held_out), rows.fetched) == (10**9 - 100, 100, 0)
    assert train[-1]["n"] in {10**9 - 1, 10**9 - 2}


@given(st.integers(2, 60).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1))))
def test_training_and_held_out_rows_are_a_partition(sizes: tuple[int, int]) -> None:
    length, count = sizes
    train, held_out = hold_out([{"n": n} for n in range(length)], count, name="any")
    assert len(held_out) == count
    assert sorted([row["n"] for row in train] + [row["n"] for row in held_out]) == list(range(length))
    assert [row["n"] for row in train] == sorted(row["n"] for row in train)
