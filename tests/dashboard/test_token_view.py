"""Pages of a rollout's tokens, whose files come one after the other."""

from __future__ import annotations

from pathlib import Path

from tailrace.dashboard.token_view import TokenPage, TokenReader
from tests.support.made_runs import MadeRun, write_export


def test_a_rollout_is_read_again_once_more_was_written_of_it(tmp_path: Path) -> None:
    run, reader = MadeRun(folder=tmp_path / "run"), TokenReader()
    entries = run.entries(3)

    def page() -> TokenPage | None:
        rollout_id = entries[0].rollout.rollout_id
        return reader.page(run.folder, rollout_id, step=3, is_evaluation=False, branch=0, first=0)

    def known() -> tuple[bool, bool]:
        found = page()
        assert found is not None
        return found.has_context, found.is_exported

    assert page() is None
    write_export(run.folder / "tokens" / "step_000003_rank_0.parquet", entries)
    assert known() == (False, True)
    run.write_tokens([3], exported=False)
    assert known() == (True, True)
    (run.folder / "tokens" / "step_000003_rank_0.parquet").unlink()
    assert known() == (True, False)
