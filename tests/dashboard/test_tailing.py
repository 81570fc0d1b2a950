from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.dashboard.metric_columns import MetricColumns
from tailrace.dashboard.tailing import Tail, first_lines, last_lines, lines_backwards


@given(st.lists(st.binary(min_size=1, max_size=9).filter(lambda line: b"\n" not in line)), st.integers(1, 7))
def test_every_line_comes_once_however_the_file_grows(tmp_path_factory, lines: list[bytes], piece: int) -> None:
    path = tmp_path_factory.mktemp("tail") / "lines"
    data = b"".join(line + b"\n" for line in lines)
    tail, seen = Tail(path), list[bytes]()
    for start in range(0, len(data), piece):
        with path.open("ab") as file:
            file.write(data[start : start + piece])
        seen.extend(tail.lines())
    assert seen == lines


def test_a_line_without_an_end_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    tail = Tail(path)
    assert [*tail.lines()] == [b'{"step": 1}']
    with path.open("ab") as file:
        file.write(b'ard": 0.5}\n')
    assert [*tail.lines()] == [b'{"step": 2, "reward": 0.5}']
    assert [*tail.lines()] == []


def test_a_file_that_a_resume_wrote_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"a":1.5}\n{"step":2,"a":2.5}\n')
    columns = MetricColumns(path)
    columns.update()
    assert columns.values("a") == [1.5, 2.5]
    generation = columns.generation
    shortened = tmp_path / "metrics.jsonl.part"
    shortened.write_bytes(b'{"step":1,"a":1.5}\n')
    shortened.replace(path)
    columns.update()
    assert columns.values("a") == [1.5]
    assert columns.generation != generation


def test_what_another_reader_took_in_before_the_file_was_written_anew_is_void(tmp_path: Path) -> None:
    """As in a page whose server was started again."""
    path = tmp_path / "metrics.jsonl"
    generations = []
    for line in (b'{"step":1,"a":1.5}\n', b'{"step":1,"a":0.5}\n'):
        path.write_bytes(line)
        columns = MetricColumns(path)
        columns.update()
        generations.append(columns.generation)
    assert generations[0] != generations[1]


def test_another_file_under_the_same_inode_is_read_from_its_beginning(tmp_path: Path) -> None:
    """As a file may get that is written where one was removed."""
    path = tmp_path / "step_000001.jsonl"
    path.write_bytes(b"old, one\nold, two\n")
    tail = Tail(path)
    generation = tail.generation
    assert (tail.start_over_if_replaced(), [*tail.lines()]) == (False, [b"old, one", b"old, two"])
    with path.open("ab") as file:
        file.write(b"old, three\n")
    assert (tail.start_over_if_replaced(), [*tail.lines()]) == (False, [b"old, three"])
    path.write_bytes(b"new, one\nnew, two\nnew, three\nnew, four\n")  # keeps the inode
    assert (tail.start_over_if_replaced(), tail.generation - generation) == (True, 1)
    assert [*tail.lines()] == [b"new, one", b"new, two", b"new, three", b"new, four"]


def test_lines_that_were_cut_short_or_are_nonsense_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"a":1.0,"b":null}\n{"step":2,"a"\nnull\n[1]\n\xff\n{"step":3,"c":3.0}\n{"st')
    columns = MetricColumns(path)
    columns.update()
    assert columns.values("step") == [1.0, 3.0]
    assert [str(value) for value in columns.values("a")] == ["1.0", "nan"]
    assert [str(value) for value in columns.values("c")] == ["nan", "3.0"]
    assert columns.matching(["a", "*"]) == ["step", "a", "c"]


def test_however_many_generators_and_names_of_nonsense_there_are_a_run_s_own_metrics_are_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {"step": 1.0} | {f"generator/generator_{number}/requests": 1.0 for number in range(6_000)}
    line |= {"policy/version": 1.0, "reward/mean": 0.5, "reward/sort/mean": 0.5, "training/loss": 0.1}
    nonsense = {"step": 2.0} | {f"nonsense {number}": 0.0 for number in range(6_000)} | {"training/kl": 0.2}
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (line, nonsense)))
    columns = MetricColumns(path)
    columns.update()
    for name in ("policy/version", "reward/mean", "reward/sort/mean", "training/loss", "training/kl"):
        assert columns.matching([name]) == [name]
    assert len(columns.matching(["generator/*"])) == 4_000
    assert len(columns.columns) < 9_000


def test_of_many_metrics_only_the_largest_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"phase/a/wall_s":1.0,"phase/b/wall_s":3.0,"phase/c/wall_s":2.0}\n')
    columns = MetricColumns(path)
    columns.update()
    assert columns.matching(["phase/*/wall_s:2"]) == ["phase/b/wall_s", "phase/c/wall_s"]
    with path.open("ab") as file:
        file.write(b'{"step":2,"phase/a/wall_s":9.0}\n')
    columns.update()
    assert columns.matching(["step", "phase/*/wall_s:2"]) == ["step", "phase/a/wall_s", "phase/b/wall_s"]


def test_the_beginning_of_a_file_is_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\nthird\ncut")
    assert [*first_lines(path, 6)] == [b"first"]
    assert [*first_lines(path, 7)] == [b"first", b"second"]
    assert [*first_lines(path, 1_000)] == [b"first", b"second", b"third"]
    assert [*first_lines(tmp_path / "none", 10)] == []


def test_the_end_of_a_file_is_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\nthird\ncut")
    assert last_lines(path, 12) == [b"third"]
    assert last_lines(path, 1_000) == [b"first", b"second", b"third"]
    assert last_lines(tmp_path / "none", 10) == []


@given(st.lists(st.sampled_from(b"\nab"), max_size=40).map(bytes), st.integers(1, 50), st.integers(1, 9))
def test_lines_backwards_are_those_at_the_end_however_little_is_read_at_once(
    tmp_path_factory, data: bytes, num_bytes: int, at_once: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "lines"
    path.write_bytes(data)
    start = max(0, len(data) - num_bytes)
    whole = data[start:].split(b"\n")[1 if start else 0 : -1]
    with patch("tailrace.dashboard.tailing._BACK_BYTES", at_once):
        assert [*lines_backwards(path, num_bytes)] == [line for line in reversed(whole) if line]
