"""A run trains the same way whatever carries its batches to the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import SettingsError
from tests.run.runs import ROLES, command, records, run_inline, tiny_settings


@pytest.mark.parametrize("batches", ["files", "zmq"])
@pytest.mark.parametrize("roles", ROLES)
def test_a_run_of_several_processes_trains_through(batches: str, roles: tuple[str, ...], tmp_path: Path) -> None:
    with command(tmp_path, *roles, "--max_steps", "2", "--transport.batches", batches) as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
        assert [record["step"] for record in records(run.folder / "metrics.jsonl")] == [1, 2]
        assert not (run.folder / "batches").exists()


async def test_a_run_of_one_process_keeps_batches_in_memory(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, "--max_steps", "1", "--transport.batches", "memory")
    assert summary.steps == 1


@pytest.mark.parametrize(
    ("placement", "batches"), [("inline", "files"), ("inline", "shared_memory"), ("local", "memory")]
)
def test_what_cannot_carry_batches_there_is_refused(placement: str, batches: str) -> None:
    with pytest.raises(SettingsError, match=f"transport.batches = '{batches}' does not go with placement"):
        tiny_settings("--placement", placement, "--transport.batches", batches, "--max_steps", "1")
