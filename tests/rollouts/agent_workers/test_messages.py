"""What crosses between orchestrator and agent worker arrives as it was, and bytes that are no message are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.environments import AgentResult
from tailrace.errors import CorruptData, EnvironmentFailed, JudgeFailed, SettingsError, TailraceError
from tailrace.records import Branch, Completion, FinishReason, FirstReply, RolloutId, Supports, Task, TaskId
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.exit_report import ExitReport
from tailrace.rollouts.agent_workers.messages import (
    Failure,
    Played,
    RolloutReport,
    first_reply_of,
    pack_rollout_report,
    pack_task,
    unpack_report,
    unpack_rollout_report,
    unpack_task,
)
from tailrace.rollouts.agent_workers.segments import Placed
from tailrace.transport.channels import encode
from tests.rollouts.agent_workers.test_playing import assert_equal_branches

TURNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), max_size=5)


def branch_of(turns: list[tuple[int, int, bool]], *, seed: int) -> Branch:
    """Context, then a completion, again and again; some with supports or mixed spans."""
    random = np.random.default_rng(seed)
    branch = Branch(None if seed % 2 else 0.5)
    for context, sampled, is_restricted in turns:
        branch.extend_context(random.integers(100, size=context).astype(np.int32), is_tool_output=context % 2 == 1)
        counts = random.integers(1, 4, size=sampled).astype(np.int32)
        supports = Supports(random.integers(100, size=int(counts.sum())).astype(np.int32), counts)
        branch.extend_completion(
            Completion(
                random.integers(100, size=sampled).astype(np.int32),
                random.normal(size=sampled).astype(np.float32),
                np.sort(random.integers(3, size=sampled)).astype(np.int32),
                FinishReason.STOP,
                mixed_spans=((0, sampled),) if sampled > 2 else (),
                supports=supports if is_restricted else None,
            )
        )
    if branch.num_tokens:
        branch.set_column("marks", random.normal(size=(branch.num_tokens, 2)))
        branch.set_column("ids", random.integers(9, size=branch.num_tokens))
    return branch


@given(TURNS, st.integers(0, 99))
def test_a_branch_arrives_as_it_was(turns: list[tuple[int, int, bool]], seed: int) -> None:
    sent = branch_of(turns, seed=seed)
    report = Played(
        rollout_id="r",
        branches=[BranchData.of(sent)],
        placed=None,
        turns=len(turns),
        truncated=False,
        report=b"",  # type: ignore[arg-type]
    )
    received = unpack_report(encode(report))
    assert isinstance(received, Played)
    branch = received.branches[0].branch()
    assert_equal_branches(sent, branch)
    assert branch.tool_spans == sent.tool_spans
    supports = [one.support_counts for one in (sent, branch)]
    if any(is_restricted for *_, is_restricted in turns):
        assert supports[0] is not None
        assert supports[1] is not None
        np.testing.assert_array_equal(*supports)
        np.testing.assert_array_equal(np.concatenate(sent.support_ids), np.concatenate(branch.support_ids))
    else:
        assert supports == [None, None]
    branch.extend_context([1, 2])  # in memory of its own


@pytest.mark.parametrize(
    "break_it",
    [
        lambda data: msgspec.structs.replace(data, completion_spans=((0, 999),)),
        lambda data: msgspec.structs.replace(data, completion_spans=((4, 2),)),
        lambda data: msgspec.structs.replace(data, logprobs=data.logprobs[:1]),
        lambda data: msgspec.structs.replace(data, supports=Supports.unrestricted(2)),
        lambda data: msgspec.structs.replace(data, columns=(msgspec.structs.replace(data.columns[0], dtype="object"),)),
    ],
)
def test_a_branch_that_cannot_be_is_refused(break_it: Callable[[BranchData], BranchData]) -> None:
    data = break_it(BranchData.of(branch_of([(3, 4, False)], seed=1)))
    with pytest.raises(CorruptData, match="a branch that is none"):
        data.branch()


@given(st.binary(max_size=64))
def test_bytes_that_are_no_report_raise_one_kind_of_error(body: bytes) -> None:
    for unpack in (unpack_report, unpack_rollout_report):
        with pytest.raises(CorruptData):
            unpack(body)


def test_a_report_with_a_broken_byte_is_refused_or_is_one() -> None:
    data = BranchData.of(branch_of([(3, 4, True)], seed=2))
    report = Played(rollout_id="r", branches=[data], placed=Placed(1, 2), turns=1, truncated=False, report=b"")  # type: ignore[arg-type]
    whole, refused = encode(report), 0
    for place, flipped in itertools.product(range(len(whole)), (0x01, 0x80, 0xFF)):
        broken = bytearray(whole)
        broken[place] ^= flipped
        try:
            received = unpack_report(bytes(broken))
            if isinstance(received, Played):
                for branch in received.branches:
                    branch.branch()
        except CorruptData:
            refused += 1
    assert refused > len(whole)


@pytest.mark.parametrize("branch", [-1, 1])
def test_a_conversation_on_a_branch_that_was_not_sent_is_refused(branch: int) -> None:
    data = BranchData.of(branch_of([(3, 4, True)], seed=2))
    report = Played(
        rollout_id=RolloutId("r"),
        branches=[data],
        placed=None,
        turns=1,
        truncated=False,
        report=b"",
        first_reply=FirstReply(1, 0, 3),
    )
    assert first_reply_of(report) == report.first_reply
    with pytest.raises(CorruptData, match=f"sent 1 branches of a rollout, and says that branch {branch} holds"):
        first_reply_of(msgspec.structs.replace(report, first_reply=FirstReply(1, branch, 3)))


def test_users_values_arrive_as_plain_ones() -> None:
    result = AgentResult(np.float32(0.5), {"n": np.int64(2)}, {"a": np.arange(2), "t": (1, 2)})  # type: ignore[arg-type, dict-item]
    unpacked = unpack_rollout_report(
        pack_rollout_report(RolloutReport([{"role": "user", "content": "x"}], {"generate_s": 0.1}, result, None))
    )
    assert unpacked.reported == AgentResult(0.5, {"n": 2}, {"a": [0, 1], "t": [1, 2]})
    assert (unpacked.messages, unpacked.scored) == ([{"role": "user", "content": "x"}], None)
    task = Task(TaskId("shop/train/3"), "shop", 3, {"price": np.float64(2.5), "name": "x"}, seed=7)
    assert unpack_task(pack_task(task)) == Task(TaskId("shop/train/3"), "shop", 3, {"price": 2.5, "name": "x"}, seed=7)
    with pytest.raises(EnvironmentFailed, match="the row of task shop/train/3: a object cannot leave a worker process"):
        pack_task(Task(TaskId("shop/train/3"), "shop", 3, {"it": object()}))


class OwnError(JudgeFailed):
    """A user's: it is made from something else, and arrives as what it is to Tailrace."""

    reason = "shop_closed"

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.mark.parametrize("error", [JudgeFailed("no"), OwnError(7), SettingsError("not so"), EnvironmentFailed("gone")])
def test_an_error_keeps_its_kind_and_reason(error: TailraceError) -> None:
    if isinstance(error, JudgeFailed):
        error.reason, error.may_pass, error.is_mistake = "other", True, True
    again = Failure.of(error).error()
    assert (type(again), str(again)) == (error.known_kind(), str(error))
    for name in ("reason", "may_pass", "is_mistake"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_an_error_of_which_more_than_its_message_is_needed_is_refused() -> None:
    for kind in ("ErrorBudgetSpent", "Nothing", "annotations"):
        with pytest.raises(CorruptData, match=f"an agent worker told of .*{kind}"):
            Failure(kind, "too many").error()


def test_last_words_name_the_line_of_users_code_in_the_thread_of_the_loop() -> None:
    text = (
        "Timeout (0:00:02)!\nThread 0x00000b [watch] (most recent call first):\n"
        f'  File "{threading_file()}", line 320 in wait\n\n'
        'Thread 0x00000a (most recent call first):\n  File "<frozen importlib>", line 1 in load\n'
        f'  File "{threading_file()}", line 320 in wait\n  File "/home/me/shop.py", line 7 in buy\n'
    )
    words = ExitReport.read(text, 10)
    assert words is not None
    assert (words.was_held, words.where) == (True, "buy (/home/me/shop.py:7)")
    assert ExitReport.read("", 10) is None
    crash = ExitReport.read(
        text.replace("Timeout (0:00:02)!", "Fatal Python error: Aborted").replace(
            "Thread 0x00000b", "Current thread 0x00000b"
        ),
        10,
    )
    assert crash is not None
    assert (crash.was_held, crash.where) == (False, f"wait ({threading_file()}:320)")


def threading_file() -> str:
    import threading

    return threading.__file__
