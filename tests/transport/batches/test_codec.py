"""What a reader of batches makes of bytes that nobody should have written: a typed error, whatever they are."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.errors import CorruptData
from tailrace.records import SUPPORT_COLUMNS, TOKEN_COLUMNS, Batch
from tailrace.transport.batches.codec import part_tensors, read_batch
from tailrace.transport.batches.stores import BatchRef, FileSource, ValueSource
from tailrace.transport.segments import SegmentFile, TensorBuffers, map_segment, read_segment, verify_body
from tests.transport.transport_builders import COLUMNS, assert_same_batch, plan

SENT = plan([9, 3, 0, 5, 2], num_ranks=2, row_tokens=10)
FUZZED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def write(path: Path, *, rank: int = 0) -> bytes:
    tensors, metadata = part_tensors(SENT.part(rank))
    segment = SegmentFile(path)
    segment.write(tensors, metadata, 1)
    segment.close()
    return path.read_bytes()


def read(path: Path) -> Batch:
    segment = read_segment(path, map_segment(path))
    verify_body(path, segment)
    return read_batch(path, segment)


def read_everywhere(folder: Path, content: bytes) -> list[Batch | CorruptData]:
    """What each implementation's reader makes of it."""
    (folder / "batch-hostile").write_bytes(content)
    ref = BatchRef(1, "batch-hostile", 1, len(content))
    read: list[Batch | CorruptData] = []
    for source, body in (
        (FileSource(folder, recycled=True), None),
        (FileSource(folder), None),
        (ValueSource(), memoryview(content)),
    ):
        try:
            read.append(source.open(ref, body))
        except CorruptData as error:
            read.append(error)
        source.close()
    return read


def assert_refused_everywhere(folder: Path, content: bytes) -> None:
    assert [type(result) for result in read_everywhere(folder, content)] == [CorruptData] * 3


def test_a_tensor_of_thousands_of_buffers_is_written_whole(tmp_path: Path) -> None:
    pieces = [np.arange(step % 7, dtype=np.int32) + step for step in range(5000)]
    joined = np.concatenate(pieces)
    segment = SegmentFile(tmp_path / "segment")
    buffers = TensorBuffers("I32", joined.shape, [piece.data for piece in pieces])
    segment.write({"token_ids": buffers}, {}, 1)
    np.testing.assert_array_equal(safetensors.numpy.load_file(segment.path)["token_ids"], joined)
    segment.close()


def test_a_tensor_whose_buffers_are_not_its_shape_is_never_written(tmp_path: Path) -> None:
    segment = SegmentFile(tmp_path / "segment")
    with pytest.raises(ValueError, match="has 12 bytes"):
        segment.write({"token_ids": TensorBuffers("I32", (4,), [np.zeros(3, np.int32).data])}, {}, 1)
    segment.close()


def test_a_file_whose_writer_died_half_way_holds_nothing(tmp_path: Path) -> None:
    content = write(tmp_path / "batch")
    assert_refused_everywhere(tmp_path, content[:-32] + bytes(32))


@pytest.mark.parametrize("end", [0, 2, 2**64 - 1])
def test_a_batch_whose_trailer_says_no_checksum_of_its_tensors_is_refused(tmp_path: Path, end: int) -> None:
    content = write(tmp_path / "batch")
    assert content[-8:] == struct.pack("<Q", 1)
    assert "has no checksum of its tensors" in refused(tmp_path, content[:-8] + struct.pack("<Q", end))


@given(length=st.integers(0, 65_503))
@FUZZED
def test_a_truncated_batch_is_corrupt_data_whether_its_trailer_is_there_or_not(tmp_path: Path, length: int) -> None:
    content = write(tmp_path / "batch")
    assert len(content) == 65_536
    assert_refused_everywhere(tmp_path, content[:length])
    assert_refused_everywhere(tmp_path, content[:length] + content[-32:])


@given(position=st.integers(0, 5000) | st.integers(-40, -1), flip=st.integers(1, 255), rank=st.integers(0, 1))
@FUZZED
def test_a_flipped_byte_is_corrupt_data_or_in_padding(tmp_path: Path, position: int, flip: int, rank: int) -> None:
    content = bytearray(write(tmp_path / "batch", rank=rank))
    content[position] ^= flip
    for result in read_everywhere(tmp_path, bytes(content)):
        if isinstance(result, Batch):
            assert_same_batch(result, SENT, rank)


@given(position=st.integers(0, 65000), junk=st.binary(min_size=1, max_size=400))
@FUZZED
def test_a_smeared_stretch_is_corrupt_data_or_in_padding(tmp_path: Path, position: int, junk: bytes) -> None:
    content = write(tmp_path / "batch")
    smeared = content[:position] + junk + content[position + len(junk) :]
    for result in read_everywhere(tmp_path, smeared):
        if isinstance(result, Batch):
            assert_same_batch(result, SENT, 0)


HOSTILE_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["I32", "F32", "BOOL", "U8", "BF16", "X"]),
        "shape": st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 20), max_size=3),
        "data_offsets": st.lists(st.integers(-(2**70), 2**70) | st.integers(-8, 500), min_size=1, max_size=3),
    }
)
NAMES = st.sampled_from([*COLUMNS, "__metadata__", "__trailer__", "__pad__1", "other"])


@given(header=st.dictionaries(NAMES, HOSTILE_ENTRIES | st.text() | st.dictionaries(st.text(), st.text())))
@FUZZED
def test_a_hostile_header_with_a_right_checksum_is_corrupt_data(tmp_path: Path, header: dict[str, object]) -> None:
    assert_refused_everywhere(tmp_path, with_header(json.dumps(header).encode()))


@given(header=st.binary(max_size=300) | st.integers(1, 50_000).map(lambda depth: b"[" * depth))
@FUZZED
def test_a_header_that_is_no_json_is_corrupt_data(tmp_path: Path, header: bytes) -> None:
    assert_refused_everywhere(tmp_path, with_header(header))


@pytest.mark.parametrize(
    "header",
    [
        b'{"token_ids": {"dtype": "I32", "shape": [%s1], "data_offsets": [0, 512]}}' % (b"9999999999999999," * 100_000),
        b'{"token_ids": {"dtype": "I32", "shape": [%s], "data_offsets": [0, 512]}}' % (b"9" * 4000),
        b'{"token_ids": {"dtype": "I32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}',
        b'{"token_ids": {"dtype": "I32", "shape": [-1, -4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "U8", "shape": [300], "data_offsets": [0, 300]},'
        b' "b": {"dtype": "U8", "shape": [300], "data_offsets": [212, 512]}}',
        b'{"token_ids": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["many dimensions", "huge number", "overflowing", "negative", "overlapping", "deep", "deep metadata"],
)
def test_an_absurd_header_is_refused_at_once(tmp_path: Path, header: bytes) -> None:
    assert_refused_everywhere(tmp_path, with_header(header))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 0])
def test_a_header_that_says_it_is_huge_is_refused_at_once(tmp_path: Path, length: int) -> None:
    content = struct.pack("<Q", length) + bytes(512) + struct.pack("<QQQQ", 1, 0, 0, 1)
    assert_refused_everywhere(tmp_path, content)


def with_header(json: bytes) -> bytes:
    """A header with its right checksum, and a body of nothing."""
    header = struct.pack("<Q", len(json)) + json
    return header + bytes(512) + struct.pack("<QQQQ", 1, xxhash.xxh3_64_intdigest(header), 0, 1)


def forge(folder: Path, columns: dict[str, NDArray[np.generic]], metadata: dict[str, str] | None = None) -> bytes:
    """A batch whose checksums are right and whose plan is not."""
    tensors, told = part_tensors(SENT.part(0))
    names = {
        np.dtype(np.uint8): "U8",
        np.dtype(np.int32): "I32",
        np.dtype(np.float32): "F32",
        np.dtype(np.bool_): "BOOL",
    }
    tensors |= {name: TensorBuffers(names[array.dtype], array.shape, [array.data]) for name, array in columns.items()}
    digest = xxhash.xxh3_64()
    for name, tensor in tensors.items():
        short = name not in {*TOKEN_COLUMNS, *SUPPORT_COLUMNS} and not name.startswith("column/")
        for buffer in tensor.buffers if short else ():
            digest.update(bytes(buffer))
    segment = SegmentFile(folder / "forged")
    segment.write(tensors, told | {"plan_xxh3": digest.hexdigest()} | (metadata or {}), 1)
    segment.close()
    return (folder / "forged").read_bytes()


def refused(folder: Path, content: bytes) -> str:
    """The one message of all readers."""
    results = read_everywhere(folder, content)
    assert [type(result) for result in results] == [CorruptData] * 3
    return str(results[0])


def test_a_forged_batch_that_is_right_is_read(tmp_path: Path) -> None:
    for result in read_everywhere(tmp_path, forge(tmp_path, {})):
        assert isinstance(result, Batch)
        assert_same_batch(result, SENT, 0)


PART = SENT.part(0).assembled()
REACHES = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12)


@given(data=st.data(), column=st.sampled_from([*COLUMNS, "payload_chunks"]))
@FUZZED
def test_a_plan_of_other_numbers_is_refused_or_stays_within_its_columns(
    tmp_path: Path, data: st.DataObject, column: str
) -> None:
    given = PART.payloads.chunks.reshape(-1) if column == "payload_chunks" else getattr(PART, column)
    size = data.draw(st.just(len(given)) | st.integers(0, 2 * len(given) + 2))
    numbers = np.resize(given, size) if len(given) else np.zeros(size, given.dtype)
    for place in data.draw(st.lists(st.integers(0, size - 1), max_size=3)) if size else []:
        numbers[place] = data.draw(REACHES)
    for result in read_everywhere(tmp_path, forge(tmp_path, {column: numbers})):
        if isinstance(result, Batch):
            rows = [result.row(index) for index in range(result.num_rows)]
            assert sum(len(row.token_ids) for row in rows) == len(result.token_ids)
            for row in rows:
                assert len(row.token_ids) == len(row.advantages) == len(row.mixed_cache) == row.sample_lengths.sum()
                assert row.supports is None or row.supports.num_tokens == len(row.token_ids)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("sample_offsets", [0, 99, 10]),
        ("sample_offsets", [1, 9, 9]),
        ("row_offsets", [0, 2, 1, 2]),
        ("row_offsets", [0, 4]),
        ("row_offsets", [0, 2, 2]),
        ("advantage_offsets", [0, 9, 2]),
        ("mixed_spans", [3, 4, 2, 3]),
        ("mixed_spans", [3]),
        ("support_offsets", [0, 3]),
        ("support_offsets", [0] * 9),
        ("support_counts", [1]),
        ("support_counts", []),
    ],
)
def test_a_plan_that_reaches_beyond_its_columns_is_named(tmp_path: Path, column: str, values: list[int]) -> None:
    named = "support_offsets" if column == "support_counts" else column
    assert named in refused(tmp_path, forge(tmp_path, {column: np.array(values, np.int32)}))


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((9, 3), np.int32),
        np.zeros((13, 3), np.int32),
        np.zeros((10, 0), np.float32),
        np.zeros((10, 2, 2), np.float32),
        np.zeros(10, np.bool_),
        np.zeros(10, np.uint8),
        np.zeros((), np.float32),
    ],
)
def test_a_named_column_that_is_not_of_the_batch_s_tokens_is_refused(
    tmp_path: Path, values: NDArray[np.generic]
) -> None:
    assert len(PART.token_ids) == 10
    assert "column/top_ids" in refused(tmp_path, forge(tmp_path, {"column/top_ids": values}))


def test_rows_know_where_their_samples_come_from(tmp_path: Path) -> None:
    (batch, *_) = read_everywhere(tmp_path, forge(tmp_path, {}))
    assert isinstance(batch, Batch)
    told = [batch.row(index).origins for index in range(batch.num_rows)]
    assert [name for origins in told for name in origins.rollout_ids] == list(PART.origins.rollout_ids)
    assert all(origins.is_sound(len(batch.row(index).temperatures)) for index, origins in enumerate(told))


@pytest.mark.parametrize(
    "origins",
    [
        [["a"], [0], ["names"], [0]],
        [["a"] * len(PART.temperatures), [0] * len(PART.temperatures), ["names"], [1] * len(PART.temperatures)],
        [["a"] * len(PART.temperatures), [0] * len(PART.temperatures), ["names"], [-1] * len(PART.temperatures)],
        {"rollout_ids": 1},
        "",
    ],
    ids=["too few", "unknown environment", "negative", "another type", "text"],
)
def test_origins_of_other_samples_are_refused(tmp_path: Path, origins: object) -> None:
    encoded = np.frombuffer(msgspec.msgpack.encode(origins), np.uint8)
    assert "samples" in (said := refused(tmp_path, forge(tmp_path, {"origins": encoded}))) or "origins" in said


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, 0), 1),
        ((0, 1), 3),
        ((0, 1), 2**31 - 1),
        ((0, 2), 3),
        ((0, 2), -2),
        ((0, 3), -1),
        ((0, 3), 1),
        ((-1, 1), 14),
    ],
)
def test_chunks_of_payloads_that_mean_what_is_not_there_are_named(
    tmp_path: Path, place: tuple[int, int], value: int
) -> None:
    chunks = PART.payloads.chunks.copy()
    chunks[place] = value
    assert "payload_chunks" in refused(tmp_path, forge(tmp_path, {"payload_chunks": chunks.reshape(-1)}))


@pytest.mark.parametrize(
    ("rank", "num_ranks"), [("2", "2"), ("-1", "2"), ("0", "0"), ("0", "1"), ("0.5", "2"), ("", "2"), ("[" * 5000, "2")]
)
def test_a_rank_that_does_not_exist_is_refused(tmp_path: Path, rank: str, num_ranks: str) -> None:
    refused(tmp_path, forge(tmp_path, {}, {"rank": rank, "num_ranks": num_ranks}))


@given(summary=st.dictionaries(st.sampled_from(SENT.summary.__struct_fields__), st.integers() | st.text() | st.none()))
@FUZZED
def test_a_summary_of_other_numbers_is_refused_or_of_a_greater_batch(
    tmp_path: Path, summary: dict[str, object]
) -> None:
    told = msgspec.structs.asdict(SENT.summary) | summary
    for result in read_everywhere(tmp_path, forge(tmp_path, {}, {"summary": json.dumps(told)})):
        if isinstance(result, Batch):
            assert result.summary.num_tokens >= len(result.token_ids)


@pytest.mark.parametrize("segment", ["../batch-1", "/etc/passwd", "batch-1/../../x", "batch-1/rank-0", "other", ""])
def test_a_reference_never_leads_out_of_its_folder(tmp_path: Path, segment: str) -> None:
    with pytest.raises(CorruptData, match="outside its folder"):
        FileSource(tmp_path).open(BatchRef(1, segment, 1, 0), None)


def test_bytes_where_none_belong_and_none_where_they_do_are_corrupt_data(tmp_path: Path) -> None:
    with pytest.raises(CorruptData):
        FileSource(tmp_path, recycled=True).open(BatchRef(1, "batch-1", 1, 0), memoryview(b""))
    with pytest.raises(CorruptData):
        ValueSource().open(BatchRef(1, "", 1, 0), None)
