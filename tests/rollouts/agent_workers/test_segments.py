"""Large branches come back by shared memory as they were; damage is an error and costs one rollout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import CorruptData, WorkerLost
from tailrace.records import Branch
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.segments import LARGE_BYTES, SEGMENTS, BranchReader, BranchWriter, Placed
from tests.rollouts.agent_workers.played import Run

TOKENS = LARGE_BYTES // 12 + 1


@pytest.fixture
def reader() -> Iterator[BranchReader]:
    reader = BranchReader()
    yield reader
    reader.close()


def writer_to(reader: BranchReader) -> BranchWriter:
    return BranchWriter(reader.files)


def branches(seed: int = 0, tokens: int = TOKENS) -> list[BranchData]:
    branch = Branch()
    branch.extend_context(np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32))
    branch.set_column("place", np.arange(tokens))
    return [BranchData.of(branch), BranchData.of(Branch())]


def placed_of(writer: BranchWriter, written: list[BranchData]) -> Placed:
    placed = writer.place(written)
    assert placed is not None
    return placed


def assert_same(read: list[BranchData], written: list[BranchData]) -> None:
    assert len(read) == len(written)
    for one, other in zip(read, written, strict=True):
        np.testing.assert_array_equal(one.branch().token_ids, other.branch().token_ids)
        assert one.columns == other.columns


def test_segments_are_recycled_once_they_are_read(reader: BranchReader) -> None:
    writer = writer_to(reader)
    for number in range(3 * SEGMENTS):
        written = branches(number, TOKENS * (1 + number % 3))  # larger and smaller than what lay there before
        placed = placed_of(writer, written)
        assert_same(reader.read(placed), written)
        writer.taken(placed.segment)


def test_what_is_small_or_finds_no_free_segment_goes_elsewhere(reader: BranchReader) -> None:
    writer = writer_to(reader)
    assert writer.place(branches(tokens=16)) is None
    places = [placed_of(writer, branches(number)) for number in range(SEGMENTS)]
    assert writer.place(branches()) is None
    for number, placed in enumerate(places):
        assert_same(reader.read(placed), branches(number))
    writer.taken(places[2].segment)
    assert placed_of(writer, branches()).segment == places[2].segment


@pytest.mark.parametrize("where", [0, 9, 400, 20_000, -8])
def test_damage_is_an_error(reader: BranchReader, where: int) -> None:
    placed = placed_of(writer_to(reader), branches())
    file = reader.files[placed.segment]
    place = where % os.fstat(file).st_size
    os.pwrite(file, bytes([os.pread(file, 1, place)[0] ^ 1]), place)
    with pytest.raises(CorruptData, match="shared memory of finished branches"):
        reader.read(placed)


def test_what_was_not_written_there_is_an_error(reader: BranchReader) -> None:
    placed = placed_of(writer_to(reader), branches())
    empty = (placed.segment + 1) % SEGMENTS
    for wrong in (Placed(empty, 1), Placed(placed.segment, 7), Placed(-1, 1), Placed(SEGMENTS, 1)):
        with pytest.raises(CorruptData):
            reader.read(wrong)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory cannot be sealed here")
def test_nobody_can_take_memory_away_from_under_its_reader(reader: BranchReader) -> None:
    placed = placed_of(writer_to(reader), branches())
    with pytest.raises(PermissionError):
        os.ftruncate(reader.files[placed.segment], 0)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at mappings through /proc")
async def test_damaged_branches_cost_one_rollout(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        with pytest.raises(WorkerLost, match=r"rollout agents-0: agent worker 0: .* damaged: their checksum differs"):
            await run.rollout("damage what it sends")
        assert (await run.rollout("much")).num_tokens > TOKENS
        assert "tailrace-branches" in Path("/proc/self/maps").read_text()
        assert run.agents.flush_figures()[0].restarts == 0
