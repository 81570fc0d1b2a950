"""Rollouts token by token: what is written is what is read, joined with what the trainer exported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import DataError, SettingsError
from tailrace.records import (
    NO_TOKEN,
    Branch,
    Completion,
    FinishReason,
    GroupId,
    Outcome,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Supports,
    Task,
    TaskId,
    common_prefix,
)
from tailrace.records.columns import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.tokens import (
    TokenOrigin,
    TokenWriter,
    exported_steps,
    list_branches,
    read_rollout,
    require_parquet,
    token_files,
)
from tailrace.reporting.tokens.files import Moment, surplus
from tailrace.tracing.background import BackgroundWriter
from tailrace.training.settings.trainer import BESIDE_ROLLOUTS

CONTEXT, SAMPLED, TOOL = TokenOrigin


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def a_completion(token_ids: list[int], version: int = 3, supports: Supports | None = None) -> Completion:
    count = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.linspace(-0.5, -1.5, count).astype(np.float32),
        policy_versions=np.full(count, version, np.int32),
        finish_reason=FinishReason.STOP,
        supports=supports,
    )


def a_branch(*, versions: Sequence[int] = (3, 4)) -> Branch:
    branch = Branch()
    branch.extend_context([1, 2, 3])
    branch.extend_completion(a_completion([4, 5], versions[0]))
    branch.extend_context([6, 7], is_tool_output=True)
    branch.extend_completion(a_completion([8], versions[1]))
    return branch


def an_entry(
    name: str = "g0/0",
    branches: Sequence[Branch] | None = None,
    *,
    outcome: Outcome | None = None,
    advantage: float | np.ndarray | None = 0.5,
) -> RolloutEntry:
    rollout = Rollout(
        rollout_id=RolloutId(name),
        group_id=GroupId(name.split("/", maxsplit=1)[0]),
        task=Task(TaskId("sort/7"), "sort", 7, {}),
        sampling=SamplingParams(temperature=0.7, max_tokens=32),
        branches=[a_branch()] if branches is None else list(branches),
        reward=Reward(0.25),
    )
    return RolloutEntry(rollout, outcome or Outcome.trained(12), advantage)


def write(
    run: Path,
    step: int,
    entries: Sequence[RolloutEntry],
    oldest: dict[RolloutId, int] | None = None,
    *,
    max_bytes: int = 10**9,
) -> None:
    writer = BackgroundWriter()
    tokens = TokenWriter(run / "tokens", writer, text_of, every_steps=1, max_bytes=max_bytes)
    tokens.write(step, entries, oldest or {})
    assert writer.close()
    assert (writer.dropped, writer.failed) == (0, 0)


def export(
    run: Path, step: int, rows: list[dict[str, object]], name: str = "rank_0.parquet", *, asked: bool = True
) -> Path:
    """As the trainer writes it."""
    import pyarrow
    from pyarrow import parquet

    path = run / "tokens" / f"step_{step:06d}_{name}"
    path.parent.mkdir(exist_ok=True)
    metadata = None if asked else {BESIDE_ROLLOUTS: b"true"}
    parquet.write_table(pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata), path)
    return path


def exported(position: int, rollout: str = "g0/0", branch: int = 0, **figures: object) -> dict[str, object]:
    known = {"trainer_logprob": -0.25, "ratio": 1.5, "entropy": 2.0, "loss": 0.125, "advantage": 3.0}
    place = {"rollout_id": rollout, "branch": branch, "position": position, "loss_mask": True, "kept": True}
    return place | known | figures


def test_a_branch_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    write(tmp_path, 12, [an_entry()])
    (branch,) = read_rollout(tmp_path, "g0/0", step=12)
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert branch.texts == [f"<{token}>" for token in range(1, 9)]
    assert branch.origins.tolist() == [CONTEXT] * 3 + [SAMPLED] * 2 + [TOOL] * 2 + [SAMPLED]
    assert branch.policy_versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4]
    assert np.isnan(branch.generator_logprobs).tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False]
    assert branch.generator_logprobs[[3, 4, 7]].tolist() == [-0.5, -1.5, -0.5]
    assert branch.advantages[[3, 4, 7]].tolist() == [0.5] * 3
    assert np.isnan(branch.advantages[[0, 5]]).all()
    assert branch.loss_mask.tolist() == (branch.origins == SAMPLED).tolist()
    assert (branch.support_sizes, branch.alternatives, branch.trainer) == (None, None, None)
    assert branch.temperature == pytest.approx(0.7)


def test_a_file_lists_its_branches_without_their_tokens(tmp_path: Path) -> None:
    filtered = an_entry("g1/0", [a_branch(), a_branch()], outcome=Outcome.filtered("zero_spread"), advantage=None)
    write(tmp_path, 12, [an_entry(), filtered])
    (file,) = token_files(tmp_path)
    assert (file.path.name, file.step, file.is_evaluation) == ("step_000012.parquet", 12, False)
    assert file.num_bytes == file.path.stat().st_size
    keys = list_branches(file)
    assert [(key.rollout_id, key.branch, key.num_tokens) for key in keys] == [
        ("g0/0", 0, 8),
        ("g1/0", 0, 8),
        ("g1/0", 1, 8),
    ]
    assert (keys[0].group_id, keys[0].task_id, keys[0].environment) == ("g0", "sort/7", "sort")
    assert (keys[0].reward, keys[0].outcome, keys[0].step) == (0.25, "trained", 12)
    assert (keys[1].outcome, keys[1].reason) == ("filtered", "zero_spread")


def test_tokens_that_were_too_old_and_rollouts_that_were_not_trained_bear_no_loss(tmp_path: Path) -> None:
    write(tmp_path, 12, [an_entry(), an_entry("g1/0", outcome=Outcome.failed("timeout"))], {RolloutId("g0/0"): 4})
    (stale,) = read_rollout(tmp_path, "g0/0", step=12)
    (failed,) = read_rollout(tmp_path, "g1/0", step=12)
    assert np.flatnonzero(stale.loss_mask).tolist() == [7]
    assert not failed.loss_mask.any()


def test_advantages_may_be_one_for_each_token(tmp_path: Path) -> None:
    write(tmp_path, 12, [an_entry(advantage=np.arange(8, dtype=np.float32)), an_entry("g1/0", advantage=None)])
    (each,) = read_rollout(tmp_path, "g0/0", step=12)
    (unknown,) = read_rollout(tmp_path, "g1/0", step=12)
    assert each.advantages[[3, 4, 7]].tolist() == [3, 4, 7]
    assert np.isnan(unknown.advantages).all()


def test_what_was_recorded_of_other_tokens_is_there(tmp_path: Path) -> None:
    branch = Branch()
    branch.extend_context([1])
    supports = Supports(np.array([4, 9, 5], np.int32), np.array([2, 1], np.int32))
    branch.extend_completion(a_completion([4, 5], supports=supports))
    branch.set_column(TEACHER_TOP_IDS, np.array([[NO_TOKEN, NO_TOKEN], [4, 9], [7, NO_TOKEN]], np.int32))
    branch.set_column(TEACHER_TOP_LOGPROBS, np.array([[0, 0], [-0.1, -2.5], [-0.3, 0]], np.float32))
    write(tmp_path, 12, [an_entry(branches=[branch]), an_entry("g1/0")])
    (read,) = read_rollout(tmp_path, "g0/0", step=12)
    assert read.support_sizes is not None
    assert read.support_sizes.tolist() == [0, 2, 1]
    assert read.alternatives is not None
    assert read.alternatives.token_ids.tolist() == [[-1, -1], [4, 9], [7, -1]]
    assert read.alternatives.texts == [["", ""], ["<4>", "<9>"], ["<7>", ""]]
    assert read.alternatives.logprobs[1].tolist() == pytest.approx([-0.1, -2.5])
    assert read_rollout(tmp_path, "g1/0", step=12)[0].alternatives is None


def test_what_the_trainer_exported_is_joined_by_rollout_branch_and_position(tmp_path: Path) -> None:
    write(tmp_path, 12, [an_entry(branches=[a_branch(), a_branch()]), an_entry("g1/0")])
    export(tmp_path, 12, [exported(7, branch=1), exported(3, rollout="g1/0"), exported(4, branch=1, kept=False)])
    export(tmp_path, 12, [exported(3, branch=1, loss_mask=False, ratio=math.inf)], "rank_1.parquet")
    first, second = read_rollout(tmp_path, "g0/0", step=12)
    assert first.trainer is None
    trainer = second.trainer
    assert trainer is not None
    assert np.flatnonzero(trainer.is_trained).tolist() == [3, 4, 7]
    assert np.flatnonzero(trainer.kept).tolist() == [3, 7]
    assert np.flatnonzero(second.loss_mask).tolist() == [4, 7]
    assert trainer.ratios[[3, 4, 7]].tolist() == [math.inf, 1.5, 1.5]
    assert np.isnan(trainer.logprobs).tolist() == (~trainer.is_trained).tolist()
    assert (trainer.entropies[7], trainer.losses[7]) == (2.0, 0.125)
    assert second.advantages[[3, 4, 7]].tolist() == [0.5, 3.0, 3.0]


def test_an_export_of_lines_is_joined_as_well(tmp_path: Path) -> None:
    import msgspec

    write(tmp_path, 12, [an_entry()])
    rows = [exported(3, ratio=None), exported(4), exported(3, rollout="g9/9")]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    (tmp_path / "tokens/step_000012_rank_0.jsonl").write_bytes(lines)
    (branch,) = read_rollout(tmp_path, "g0/0", step=12)
    assert branch.trainer is not None
    assert branch.trainer.ratios[4] == 1.5
    assert np.isnan(branch.trainer.ratios[3])


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_export_alone_tells_what_was_trained_on_in_its_place(tmp_path: Path, form: str) -> None:
    import msgspec

    figures = {"token_id": 7, "text": "<7>", "policy_version": 2, "support_size": 0, "generator_logprob": -0.5}
    rows = [exported(4, **figures), exported(2, **figures | {"text": "<9>"}), exported(1, branch=1, **figures)]
    if form == "parquet":
        export(tmp_path, 12, rows)
    else:
        (tmp_path / "tokens").mkdir()
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        (tmp_path / "tokens/step_000012_rank_0.jsonl").write_bytes(lines)
    assert (token_files(tmp_path), exported_steps(tmp_path)) == ([], [12])
    first, second = read_rollout(tmp_path, "g0/0", step=12)
    assert first.token_ids.tolist() == [-1, -1, 7, -1, 7]
    assert first.texts == ["", "", "<9>", "", "<7>"]
    assert first.origins.tolist() == [CONTEXT, CONTEXT, SAMPLED, CONTEXT, SAMPLED]
    assert first.policy_versions.tolist() == [-1, -1, 2, -1, 2]
    assert first.loss_mask.tolist() == (first.origins == SAMPLED).tolist()
    assert first.generator_logprobs[[2, 4]].tolist() == [-0.5, -0.5]
    assert np.isnan(first.generator_logprobs[[0, 1, 3]]).all()
    assert first.trainer is not None
    assert first.trainer.ratios[4] == 1.5
    assert (first.key.num_completion_tokens, second.num_tokens) == (2, 2)
    assert read_rollout(tmp_path, "g0/0", step=12, is_evaluation=True) == []


def test_evaluations_have_files_of_their_own(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    tokens = TokenWriter(tmp_path / "tokens", writer, text_of, every_steps=2, max_bytes=10**9)
    tokens.write(39, [an_entry()], {})
    tokens.write(40, [an_entry()], {})
    tokens.write_evaluation(41, [an_entry("e/0", outcome=Outcome.filtered("evaluated"))])
    assert writer.close()
    assert [(file.step, file.is_evaluation) for file in token_files(tmp_path)] == [(40, False), (41, True)]
    assert read_rollout(tmp_path, "e/0", step=41) == []
    (branch,) = read_rollout(tmp_path, "e/0", step=41, is_evaluation=True)
    assert branch.num_tokens == 8


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    tokens = TokenWriter(tmp_path / "tokens", writer, text_of, every_steps=0, max_bytes=10**9)
    tokens.write(1, [an_entry()], {})
    tokens.write_evaluation(1, [an_entry()])
    assert writer.close()
    assert writer.dropped == 0
    assert not (tmp_path / "tokens").exists()
    assert token_files(tmp_path) == []


def test_long_rollouts_are_spread_over_row_groups_and_one_alone_is_read(tmp_path: Path) -> None:
    def long_branch(count: int, first: int) -> Branch:
        branch = Branch()
        branch.extend_completion(a_completion([(first + place) % 1000 for place in range(count)]))
        return branch

    entries = [an_entry(f"g{index}/0", [long_branch(40_000, index), long_branch(10, index)]) for index in range(4)]
    write(tmp_path, 1, entries)
    for index in range(4):
        branches = read_rollout(tmp_path, f"g{index}/0", step=1)
        assert [branch.num_tokens for branch in branches] == [40_000, 10]
        assert branches[0].token_ids[:2].tolist() == [index, index + 1]
        assert common_prefix(*(branch.token_ids for branch in branches)) == 10
    (only,) = read_rollout(tmp_path, "g1/0", step=1, max_tokens=5)
    assert only.num_tokens == 40_000


def test_a_file_that_is_not_whole_is_none_and_a_broken_one_is_told_of(tmp_path: Path) -> None:
    write(tmp_path, 12, [an_entry()])
    (file,) = token_files(tmp_path)
    whole = file.path.read_bytes()
    file.path.with_name("step_000013.parquet.part").write_bytes(whole[:100])
    assert len(token_files(tmp_path)) == 1
    file.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"step_000012\.parquet holds no tokens"):
        list_branches(file)
    with pytest.raises(DataError, match=r"step_000012\.parquet holds no tokens"):
        read_rollout(tmp_path, "g0/0", step=12)
    file.path.write_bytes(whole)
    export(tmp_path, 12, [exported(3)]).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="holds no exported tokens"):
        read_rollout(tmp_path, "g0/0", step=12)


def test_an_export_of_other_tokens_than_the_branch_has_is_told_of(tmp_path: Path) -> None:
    write(tmp_path, 12, [an_entry()])
    export(tmp_path, 12, [exported(800)])
    with pytest.raises(DataError, match="out of bounds"):
        read_rollout(tmp_path, "g0/0", step=12)


def test_what_a_start_left_half_written_goes_when_the_next_file_is_written(tmp_path: Path) -> None:
    orphan = tmp_path / "tokens/step_000003.parquet.part"
    orphan.parent.mkdir()
    orphan.write_bytes(b"half")
    write(tmp_path, 12, [an_entry()])
    assert not orphan.exists()


def test_the_folder_is_bounded_and_what_is_left_spans_the_run(tmp_path: Path) -> None:
    write(tmp_path, 1, [an_entry()])
    (size,) = {file.num_bytes for file in token_files(tmp_path)}
    for step in range(2, 41):
        write(tmp_path, step, [an_entry()], max_bytes=6 * size)
    steps = [file.step for file in token_files(tmp_path)]
    assert len(steps) in (5, 6)
    assert (steps[0], steps[-1]) == (1, 40)
    assert max(np.diff(steps)) <= 16


@pytest.mark.parametrize("asked", [False, True])
def test_exports_that_were_asked_for_stay_whichever_start_wrote_them(tmp_path: Path, asked: bool) -> None:
    old = export(tmp_path, 1, [exported(3)], asked=asked)
    lines, broken = (old.with_suffix(suffix) for suffix in (".jsonl", ".parquet.part"))
    for path in (lines, broken):
        path.write_text("half")
    write(tmp_path, 1, [an_entry()])
    write(tmp_path, 2, [an_entry()], max_bytes=1)
    assert [file.step for file in token_files(tmp_path)] == [2]
    assert old.exists() is asked
    assert lines.exists()
    assert broken.exists()


def test_exports_that_were_asked_for_are_not_counted(tmp_path: Path) -> None:
    write(tmp_path, 1, [an_entry()])
    (file,) = token_files(tmp_path)
    large = export(tmp_path, 1, [exported(position) for position in range(8000)])
    write(tmp_path, 2, [an_entry()], max_bytes=3 * file.num_bytes)
    assert large.stat().st_size > file.num_bytes
    assert [file.step for file in token_files(tmp_path)] == [1, 2]


def test_a_text_that_no_file_holds_costs_itself_alone(tmp_path: Path) -> None:
    entry = an_entry()
    entry.rollout.task = Task(TaskId("sort/\ud800"), "sort", 7, {})
    write(tmp_path, 12, [entry])
    (key,) = list_branches(token_files(tmp_path)[0])
    assert key.task_id == "sort/?"


def test_a_missing_extra_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    require_parquet(10)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_parquet(0)
    with pytest.raises(SettingsError, match=r"tailrace\[parquet\]"):
        require_parquet(10)


@given(st.dictionaries(st.integers(0, 300), st.integers(1, 100), min_size=1), st.integers(0, 3000))
def test_what_is_kept_is_bounded_and_holds_the_newest(sizes: dict[int, int], max_bytes: int) -> None:
    moments = {Moment(step): size for step, size in sizes.items()}
    gone = surplus(moments, max_bytes)
    kept = set(moments) - set(gone)
    assert len(gone) == len(set(gone))
    assert max(moments) in kept
    assert sum(moments[moment] for moment in kept) <= max_bytes or len(kept) == 1
    if len(kept) > 1:
        assert min(moments) in kept
