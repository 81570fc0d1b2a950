"""Rows come from files by index, and a file that is no data set says so."""

from __future__ import annotations

import codecs
import copy
import csv
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.environments import EnvironmentSpec, Policy, Task, load_rows
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


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, ensure_ascii=False))
    return path


def pack(path: Path) -> Path:
    """The file gzipped, beside it."""
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


def write_packed_jsonl(path: Path) -> Path:
    return pack(write_jsonl(path))


def write_packed_json(path: Path) -> Path:
    return pack(write_json(path))


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
    ("write", "name"),
    [
        *((write_jsonl, "d.jsonl"), (write_json, "d.json"), (write_parquet, "d.parquet"), (write_saved_dataset, "d")),
        *((write_packed_jsonl, "d.jsonl"), (write_packed_json, "d.json")),
    ],
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
        *(
            ('{"a": 1}\n{"a": ' + "[" * levels + "]" * levels + "}\n", "line 2: the row nests more than 256 arrays")
            for levels in (256, 450, 900, 100_000)
        ),
        ('"hello"\n', "line 1: a task row is a JSON object, not a string"),
    ],
)
def test_a_bad_jsonl_file_is_refused_with_file_and_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"broken\.jsonl") as caught:
        load_rows(tmp_path / "broken.jsonl")
    assert says in str(caught.value)


@pytest.mark.parametrize("levels", [256, 450, 900, 100_000])
def test_a_json_file_with_a_row_too_deep_to_be_copied_is_refused_with_its_entry(levels: int, tmp_path: Path) -> None:
    deep = '{"a": ' + "[" * levels + "]" * levels + "}"
    (tmp_path / "deep.json").write_text(f'[{{"a": "[[{{\\""}}, {deep}, {{}}]')
    with pytest.raises(DataError, match=r"deep\.json, entry 1: the row nests more than 256 arrays and objects"):
        load_rows(tmp_path / "deep.json")


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_rows_that_nest_as_deep_as_they_may_are_copied(name: str, tmp_path: Path) -> None:
    row = '{"a": ' + "[" * 255 + "]" * 255 + "}"
    (tmp_path / name).write_text(f"[{row}]" if name == "deep.json" else row)
    assert copy.deepcopy(load_rows(tmp_path / name)[0])["a"]


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xe4"}\n')
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        load_rows(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("name", ["data/nowhere.jsonl", "nowhere.csv.gz"])
def test_a_missing_file_is_named_and_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"{name} does not exist \(looked in {tmp_path}\)$"):
        load_rows(name)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose beginning nobody may read")
@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv", "data.jsonl.gz"])
def test_a_file_that_cannot_be_read_is_refused_with_the_systems_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=rf"{tmp_path}/{name} .*Input/output error"):
        load_rows(tmp_path / name)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: File name too long|does not exist"):  # by Python's version
        load_rows(tmp_path / f"{'long' * 100}.jsonl")


@pytest.mark.parametrize(("name", "write"), [("d.jsonl", write_jsonl), ("d.json", write_json)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_byte_order_mark_as_windows_writes_it_is_no_part_of_the_rows(
    name: str, write: Callable[[Path], Path], is_packed: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / name)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert list(load_rows(pack(path) if is_packed else path)) == ROWS


def test_an_unknown_kind_of_file_says_which_are_known(tmp_path: Path) -> None:
    (tmp_path / "rows.xml").write_text("<row/>")
    with pytest.raises(DataError, match=r"no known kind; expected \.jsonl, .*\.csv .*\.parquet"):
        load_rows(tmp_path / "rows.xml")


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_rows_of_a_csv_file_are_texts_by_the_names_of_its_first_line(tmp_path: Path, is_packed: bool) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"Which, näher?\nOr far?",1\nb,\n', encoding="utf-8-sig")
    rows = load_rows(pack(path) if is_packed else path)
    assert list(rows) == [{"question": "Which, näher?\nOr far?", "answer": "1"}, {"question": "b", "answer": ""}]


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"document,answer\n{'x' * 200_000},1\n")
    limit = csv.field_size_limit()
    assert len(load_rows(tmp_path / "rows.csv")[0]["document"]) == 200_000
    assert csv.field_size_limit() == limit


def test_empty_lines_of_a_csv_file_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n\na,1\n\nb,2\n\n")
    assert [row["question"] for row in load_rows(tmp_path / "rows.csv")] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rows.csv", b"a,b\n1,2\n3\n", r"rows\.csv, line 3: 1 values for the 2 columns of line 1 \(a, b\)"),
        ("rows.csv", b'a,b\n"1,2\n', r"rows\.csv is not a CSV file"),
        ("rows.csv", b"a,b\n", "is empty"),
        ("rows.csv", b"a,b,a\n1,2,3\n", r"rows\.csv, line 1: 'a' names more than one column"),
        ("rows.json", b'{"a": 1}\n{"a": 2}\n', r"one object a line belongs into a \.jsonl file"),
        ("rows.json", b'{"rows": []}', "holds an object; a data set is an array of objects"),
        ("rows.json", b'[{"a": 1}, 2]', "entry 1: a task row is a JSON object, not a number"),
        ("rows.jsonl.gz", b"plain", "is not a readable gzip file"),
        ("rows.json.gz", gzip.compress(b"[]" * 99, mtime=0)[:20], "is not a readable gzip file"),
    ],
)
def test_a_bad_file_is_refused_with_what_was_expected(tmp_path: Path, name: str, text: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=says):
        load_rows(tmp_path / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` without a network; it knows the data set `owner/numbers`, which is a folder here."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "owner" / "numbers").mkdir(parents=True)
    for split, count in (("train", 20), ("test", 3)):
        lines = [json.dumps({"n": n}) for n in range(count)]
        (tmp_path / "owner" / "numbers" / f"{split}.jsonl").write_text("\n".join(lines))


@pytest.mark.usefixtures("hub")
def test_a_data_set_of_the_hub_is_named_with_its_split() -> None:
    assert [len(load_rows(f"hub:owner/numbers{split}")) for split in ("", ":test", ":train[:7]")] == [20, 3, 7]
    assert load_rows("hub:owner/numbers:test")[2] == {"n": 2}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hub:owner/numbers:valid", 'hub:owner/numbers:valid cannot be loaded: ValueError: Unknown split "valid"'),
        ("hub:owner/nothing", r"hub:owner/nothing cannot be loaded: \w+: "),
        ("hub:", "names no data set; write hub:OWNER/NAME"),
        ("owner/nothing", r"does not exist .*; one of the Hugging Face hub is hub:owner/nothing"),
    ],
)
def test_a_data_set_that_the_hub_has_not_is_told(name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_rows(name)


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        SettingsError, match=r'a data set of the hub needs datasets: pip install "tailrace\[datasets\]"'
    ):
        load_rows("hub:owner/numbers")


async def _silent(task: Task, policy: Policy) -> float:
    return 0.0


def test_a_dataset_object_is_a_sequence_of_task_rows_and_what_is_none_is_refused() -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"n": n} for n in range(20)])
    spec = EnvironmentSpec(name="numbers", agent=_silent, train_tasks=rows, required_columns=("n",))
    assert [spec.train_task(index).row for index in (0, 19)] == [{"n": 0}, {"n": 19}]
    train, held_out = hold_out(rows, 5, name="numbers")
    assert sorted(row["n"] for part in (train, held_out) for row in part) == list(range(20))
    with pytest.raises(SettingsError, match=r"maps names to rows \(a DatasetDict\?\); choose one: train, test"):
        EnvironmentSpec(name="any", agent=_silent, train_tasks=datasets.DatasetDict(train=rows, test=rows))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="is a IterableDataset, which has no length and index"):
        EnvironmentSpec(name="any", agent=_silent, eval_tasks=rows.to_iterable_dataset())


MIXED: list[dict[str, Any]] = [
    {"answer": 1, "parts": [1, "x"], "info": {"unit": None, "value": 0.5}},
    {"answer": "x", "parts": [], "info": {"unit": "m", "value": [1]}},
    {"answer": None, "parts": [{"a": []}], "info": None},
]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_values_of_several_types_in_a_column_come_back_as_they_are(kind: str, tmp_path: Path) -> None:
    from datasets import Dataset, Features, Json, List, Value

    types = {"answer": Json(), "parts": List(Json()), "info": {"unit": Value("string"), "value": Json()}}
    saved = Dataset.from_list(MIXED, features=Features(types))
    if kind == "parquet":
        saved.to_parquet(tmp_path / "rows.parquet")
    else:
        saved.save_to_disk(tmp_path / "rows")
    rows = load_rows(tmp_path / ("rows.parquet" if kind == "parquet" else "rows"))
    assert [rows[index] for index in (2, 0, 1)] == [MIXED[2], MIXED[0], MIXED[1]]


def test_a_text_that_is_no_json_in_a_column_of_it_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"answer": arrow.array(["1", "{"], arrow.json_())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="row 1 of the data set: its column 'answer' is no JSON"):
        list(load_rows(tmp_path / "rows.parquet"))


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


def test_the_first_held_out_rows_are_of_the_whole_data_set() -> None:
    _, held_out = hold_out([{"n": n} for n in range(10_000)], 1_000, name="sorted by difficulty")
    first = [row["n"] for row in held_out[:64]]
    assert min(first) < 1_000
    assert max(first) > 9_000
    assert 4_000 < sum(first) / 64 < 6_000


@given(st.integers(2, 60).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1))))
def test_training_and_held_out_rows_are_a_partition(sizes: tuple[int, int]) -> None:
    length, count = sizes
    train, held_out = hold_out([{"n": n} for n in range(length)], count, name="any")
    assert len(held_out) == count
    assert sorted([row["n"] for row in train] + [row["n"] for row in held_out]) == list(range(length))
    assert [row["n"] for row in train] == sorted(row["n"] for row in train)
