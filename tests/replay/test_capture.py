from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tailrace.config import load_settings
from tailrace.errors import DataError
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    FirstReply,
    Group,
    GroupId,
    PayloadChunk,
    PayloadRef,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Supports,
    Task,
    TaskId,
)
from tailrace.replay.capture import CaptureWriter, capture_folders, read_capture
from tailrace.replay.command import captured
from tailrace.tracing.background import BackgroundWriter


def completion(
    size: int, version: int, *, chunks: tuple[PayloadChunk, ...] = (), supports: Supports | None = None
) -> Completion:
    return Completion(
        token_ids=np.arange(size, dtype=np.int32),
        logprobs=-np.arange(size, dtype=np.float32),
        policy_versions=np.full(size, version, np.int32),
        finish_reason=FinishReason.STOP,
        mixed_spans=((1, 3),),
        routed_experts=chunks,
        supports=supports,
    )


def branch(*, ends_with_context: bool = False) -> Branch:
    grown = Branch()
    grown.extend_context([7, 8, 9])
    grown.extend_completion(completion(4, 2, chunks=(PayloadChunk(0, 6, PayloadRef("memory:1", "uint8", (6, 2, 2))),)))
    supports = Supports(np.array([8, 0, 1, 5], np.int32), np.array([2, 1, 1], np.int32))
    grown.extend_completion(completion(3, 3, supports=supports if ends_with_context else None))
    if ends_with_context:
        grown.extend_context([5])
        grown.set_column("weights", [0.5, 2.0], start=4)
        grown.set_column("ids", [[1, 2], [3, 4]])
    return grown


def group(number: int = 1) -> Group:
    task = Task(TaskId(f"words/{number}"), "words", number, {"text": "höher", "answer": 3}, seed=5)
    group_id = GroupId(f"words/{number}#1")
    rollouts = [
        Rollout(
            RolloutId(f"{group_id}.{place}"),
            group_id,
            task,
            SamplingParams(temperature=0.7),
            branches,
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            first_reply=FirstReply(1, 0, 3) if reward else None,
            sampled_texts={1: "<think>hm</think>b"} if reward else {},
            reward=reward,
            turns=2,
            metrics={"generate_s": 0.5},
        )
        for place, (branches, reward) in enumerate(
            [
                ([branch(), branch(ends_with_context=True)], Reward(1.0, {"exact": 1.0}, {"seen": [1, "x"]})),
                ([], None),
            ]
        )
    ]
    return Group(group_id, task, rollouts, [0.5, np.array([0.25, -1.0], np.float32)])


def written(folder: Path, *groups: Group, steps: int = 1, max_bytes: int = 1 << 20, settings_json: str = "{}") -> Path:
    writer = BackgroundWriter()
    capture = CaptureWriter(folder / "capture", writer, steps=steps, max_bytes=max_bytes, settings_json=settings_json)
    for one in groups:
        capture.write(one)
        capture.step_ended()
    writer.close()
    assert writer.failed == 0
    return folder / "capture"


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    (read,) = read_capture(written(tmp_path, group()))
    original = group()
    assert (read.group_id, read.task) == (original.group_id, original.task)
    assert read.advantages is not None
    assert read.advantages[0] == 0.5
    assert np.asarray(read.advantages[1]).tolist() == [0.25, -1.0]
    for name in ("rollout_id", "sampling", "messages", "first_reply", "sampled_texts", "reward", "turns", "metrics"):
        assert [getattr(one, name) for one in read.rollouts] == [getattr(one, name) for one in original.rollouts]
    branches = zip(read.rollouts[0].branches, original.rollouts[0].branches, strict=True)
    for one, other in branches:
        for column in ("token_ids", "logprobs", "policy_versions", "loss_mask"):
            assert getattr(one, column).tolist() == getattr(other, column).tolist(), column
        assert [ids.tolist() for ids in one.support_ids if len(ids)] == [ids.tolist() for ids in other.support_ids]
        if other.support_counts is not None:
            assert one.support_counts is not None
            assert one.support_counts.tolist() == other.support_counts.tolist()
        for name in ("completion_spans", "mixed_spans", "payload_chunks", "oldest_version"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.columns.keys() == other.columns.keys()
        for name, values in other.columns.items():
            np.testing.assert_array_equal(one.columns[name], values)


def test_numpy_values_that_user_code_made_are_captured_as_plain_ones(tmp_path: Path) -> None:
    made = group()
    made.rollouts[0].reward = Reward(1.0, {"exact": np.float32(0.5)}, {"seen": np.array([1, 2]), "at": np.int64(3)})  # type: ignore[dict-item]
    (read,) = read_capture(written(tmp_path, made))
    assert read.rollouts[0].reward == Reward(1.0, {"exact": 0.5}, {"seen": [1, 2], "at": 3})


def test_a_capture_of_before_first_replies_were_kept_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, group())
    (path,) = folder.glob("*.msgpack")
    record = msgspec.msgpack.decode(path.read_bytes())
    for rollout in record["rollouts"]:
        del rollout["first_reply"], rollout["sampled_texts"]
    path.write_bytes(msgspec.msgpack.encode(record))
    (read,) = read_capture(folder)
    assert [rollout.first_reply for rollout in read.rollouts] == [None, None]
    assert [rollout.messages for rollout in read.rollouts] == [rollout.messages for rollout in group().rollouts]


def test_only_the_first_steps_are_captured(tmp_path: Path) -> None:
    assert len(read_capture(written(tmp_path, group(1), group(2), group(3), steps=2))) == 2


def test_nothing_is_captured_unless_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path, group(), steps=0)
    assert not folder.exists()
    with pytest.raises(DataError, match="--capture 2"):
        read_capture(folder)


def test_a_capture_keeps_to_its_size(tmp_path: Path) -> None:
    one_group = sum(path.stat().st_size for path in written(tmp_path / "one", group()).glob("group_*"))
    folder = written(tmp_path / "more", *(group() for _ in range(4)), steps=9, max_bytes=one_group * 5 // 2)
    assert len(read_capture(folder)) == 2


def test_a_capture_after_a_resume_leaves_the_earlier_ones_as_they_are(tmp_path: Path) -> None:
    first = written(tmp_path, group(1), group(2), steps=2)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    for number in (7, 8):
        written(tmp_path, group(number))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    folders = capture_folders(first)
    assert [folder.name for folder in folders] == ["capture", "capture_2", "capture_3"]
    assert [[one.task.index for one in read_capture(folder)] for folder in folders] == [[1, 2], [7], [8]]


def test_what_is_replayed_of_a_run_is_its_newest_capture(tmp_path: Path) -> None:
    settings = load_settings("quickstart").model_dump_json()
    for number in (1, 7):
        folder = written(tmp_path, group(number), settings_json=settings)
    assert [one.task.index for one in captured(tmp_path).captured] == [7]
    assert [one.task.index for one in captured(folder).captured] == [1]


@pytest.mark.parametrize("suffix", [".safetensors", ".msgpack"])
def test_a_damaged_file_is_named(tmp_path: Path, suffix: str) -> None:
    folder = written(tmp_path, group())
    (folder / f"group_000001{suffix}").write_bytes(b"\x93nothing")
    with pytest.raises(DataError, match=r"group_000001\.msgpack"):
        read_capture(folder)
