from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tailrace.errors import DataError
from tailrace.records import RunStatus
from tailrace.reporting.observer import with_figures
from tailrace.reporting.summary import LedgerSummary, RunSummary, read_summary, summary_text, write_summary
from tailrace.reporting.totals import RunTotals


def a_summary() -> RunSummary:
    ledger = LedgerSummary(
        admitted=2_600,
        in_flight=40,
        by_state={"trained": 2_432, "filtered": 120, "failed": 8},
        by_reason={"filtered": {"zero_spread": 112, "stale": 8}, "failed": {"timeout": 8}},
    )
    return RunSummary(
        name="quickstart",
        status=RunStatus.FINISHED,
        steps=60,
        policy_version=60,
        wall_s=113.0,
        ledger=ledger,
        reward_first=0.21,
        reward_last=0.93,
        tokens_generated=1_200_000,
        tokens_trained=1_100_000,
        length_ratio=0.98,
        loss_length_ratio=0.91,
        wasted_tokens=9_400,
        masked_tokens=1_200,
        masked_share=0.0125,
        trainer_wait_s=4.25,
        admission_waits_s={"engines_full": 80.0, "budget_spent": 2.25, "enough": 0.01},
        staleness_mean=0.8,
        staleness_max=3,
        peak_rss_bytes={"trainer": 900_000_000},
    )


def test_a_summary_survives_its_file(tmp_path: Path) -> None:
    write_summary(tmp_path, a_summary())
    assert read_summary(tmp_path) == a_summary()
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_text_names_every_state_and_reason_and_the_invariant() -> None:
    text = summary_text(a_summary())
    assert "admitted 2,600 = terminal 2,560 + in flight 40" in text
    assert "2,432 trained, 120 filtered (zero_spread 112, stale 8), 8 failed (timeout 8)" in text
    assert "finished" in text


def test_the_text_tells_every_bias_next_to_the_throughput() -> None:
    text = summary_text(a_summary())
    assert "length ratio 0.980 · loss length ratio 0.910 · 9,400 tokens wasted · 1,200 masked (1.2 %)" in text
    assert "0.80 versions mean, 3 max" in text
    assert "trainer 4.2 s for a batch · admission 80 s engines full, 2.2 s budget spent" in text


def test_on_a_terminal_of_80_columns_the_text_breaks_only_between_words() -> None:
    reasons = {"cancelled": {"run_ended": 128}, "filtered": {"zero_spread": 112, "stale": 8}}
    ledger = LedgerSummary(by_state={"trained": 2_432, "filtered": 120, "cancelled": 128}, by_reason=reasons)
    summary = msgspec.structs.replace(a_summary(), ledger=ledger, training_tokens_per_s=1e4, tokens_per_cpu_s=5e3)
    whole, broken = summary_text(summary), summary_text(summary, 80)
    assert max(map(len, whole.splitlines())) > 80 >= max(map(len, broken.splitlines()))
    assert broken.split() == whole.split()


def test_the_text_says_of_how_many_steps_the_last_reward_is() -> None:
    assert "0.210 at first, 0.930 at last" in summary_text(a_summary())
    several = msgspec.structs.replace(a_summary(), reward_last_steps=8)
    assert "0.210 at first, 0.930 over the last 8 steps" in summary_text(several)


def test_the_text_says_how_many_steps_were_skipped_where_some_were() -> None:
    assert "60 in 1:53, policy version 60" in summary_text(a_summary())
    skipped = msgspec.structs.replace(a_summary(), skipped_steps=3, policy_version=57)
    assert "60 in 1:53, 3 skipped, policy version 57" in summary_text(skipped)


@pytest.mark.parametrize("elsewhere", [None, 0, 1], ids=["never", "first start", "second start"])
def test_of_a_run_with_a_role_elsewhere_in_any_start_no_tokens_per_cpu_second_are_told(elsewhere: int | None) -> None:
    line = {
        "wall_s": 1.0,
        "policy/version": 1,
        "batch/loss_tokens": 30,
        "cpu/trainer_s": 2.0,
        "cpu/orchestrator_s": 1.0,
    }
    lines = [{"step": step, **line} for step in (1, 2)]
    if elsewhere is not None:
        lines[elsewhere]["cpu/elsewhere"] = 1.0
    summary = with_figures(a_summary(), RunTotals(lines), LedgerSummary())
    assert (summary.cpu_s, summary.tokens_per_cpu_s) == ((6.0, 10.0) if elsewhere is None else (None, None))
    assert ("per CPU-second" in summary_text(summary)) == (elsewhere is None)


def test_a_ledger_that_does_not_balance_is_not_called_balanced() -> None:
    assert LedgerSummary(admitted=3, in_flight=1, by_state={"trained": 1}).invariant_line().startswith("admitted 3 ≠")


def test_a_run_that_did_nothing_has_a_summary_too() -> None:
    summary = RunSummary(name="x", status=RunStatus.FAILED, reason="the trainer left")
    assert "failed: the trainer left" in summary_text(summary)


def test_why_a_run_ended_does_not_steer_the_terminal() -> None:
    summary = RunSummary(name="x", status=RunStatus.FAILED, reason="the latest: \x1b[2J\u202e")
    assert r"failed: the latest: \x1b[2J\u202e" in summary_text(summary)


def test_a_file_that_is_no_summary_is_named(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(DataError, match=r"summary\.json"):
        read_summary(tmp_path)
