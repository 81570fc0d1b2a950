"""A rollout is put together from what the environment server tells, or says what is missing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.environments.adapters.verifiers_v1.environment import result_of
from tailrace.environments.adapters.verifiers_v1.wire import Episode, Trace, cancel_request, run_request
from tailrace.errors import EnvironmentFailed

pack = msgspec.msgpack.encode


def reply(*traces: tuple[str, int, int], **more: Any) -> bytes:
    lengths = [{"id": name, "nodes": nodes, "calls": calls} for name, nodes, calls in traces]
    return pack({"success": True, "error": None, "head": {"id": "e", "errors": []}, "traces": lengths, **more})


def heard(*deltas: dict[str, Any]) -> Episode:
    episode = Episode()
    for delta in deltas:
        episode.hear(pack(delta))
    return episode


OPEN = {"trace": "a", "open": {"version": 1, "task": {"type": "T"}}, "set": {"ok": False, "agent": {"name": "agent"}}}
TURN = {"trace": "a", "nodes": [{"token_ids": [1, 2]}, {"token_ids": [3]}], "calls": [{"node": 1}], "links": {0: []}}
END = {"trace": "a", "set": {"ok": True, "rewards": {"right": {"score": 1, "weight": 0.5}}, "metrics": {"words": 3}}}


def test_a_trace_grows_by_deltas_and_keeps_the_latest_of_each_value() -> None:
    noted = {"trace": "a", "set": {"info": {"parsed": "5"}, "metrics": {"words": 2}, "stop_condition": None}}
    trace = heard(OPEN, TURN, noted, TURN, END).finished(reply(("a", 4, 2)))
    assert (trace.nodes, trace.calls, trace.metrics, trace.info) == (4, 2, {"words": 3}, {"parsed": "5"})
    result = result_of(trace)
    assert (result.reward, result.metrics) == (0.5, {"right": 1.0, "words": 3.0})
    assert result.info == {"parsed": "5", "stop_condition": None, "session_id": "a"}


def test_a_trace_that_was_given_up_is_forgotten() -> None:
    again = [{**delta, "trace": "b"} for delta in (OPEN, TURN, END)]
    trace = heard(OPEN, TURN, {"trace": "a", "discard": True}, *again).finished(reply(("b", 2, 1)))
    assert trace.trace_id == "b"


def test_without_rewards_there_is_none_and_one_that_was_not_computed_costs_the_rollout() -> None:
    assert result_of(Trace("a")).reward is None
    unscored = {"trace": "a", "set": {"ok": True, "stop_condition": "timeout", "rewards": {"right": None}}}
    with pytest.raises(EnvironmentFailed, match="ended with timeout, and did not compute right"):
        result_of(heard(OPEN, TURN, unscored).finished(reply(("a", 2, 1))))


@pytest.mark.parametrize(
    ("deltas", "last", "says"),
    [
        ([OPEN, END], reply(("a", 2, 1)), "a part of what trace a said never came"),
        ([], reply(("a", 0, 0)), "a part of what trace a said never came"),
        ([OPEN, TURN], reply(("a", 2, 1)), "it is not ok, and says nothing of why"),
        ([OPEN, TURN, END], reply(("a", 2, 1), ("b", 1, 1)), "it ended with 2 traces"),
        ([OPEN], reply(head={"errors": [{"type": "EnvError", "message": "run() raised"}]}), "EnvError: run"),
        ([OPEN], pack({"success": False, "error": "TypeError: no"}), "verifiers: TypeError: no"),
        ([OPEN], b"\xc1", "a reply that cannot be read"),
        (
            [OPEN, {"trace": "a", "errors": [{"type": "HarnessError", "message": "exit 1"}]}],
            reply(("a", 0, 0)),
            "HarnessError: exit 1",
        ),
    ],
)
def test_what_went_wrong_costs_the_rollout_and_is_named(deltas: list[dict[str, Any]], last: bytes, says: str) -> None:
    with pytest.raises(EnvironmentFailed, match=says):
        heard(*deltas).finished(last)


def test_a_delta_that_is_none_costs_the_rollout() -> None:
    with pytest.raises(EnvironmentFailed, match="a delta that cannot be read"):
        Episode().hear(pack({"nodes": 5}))


def test_requests_are_what_verifiers_reads() -> None:
    request = msgspec.msgpack.decode(run_request({"idx": 3}, {"type": "train"}))
    assert request == {"task_data": {"idx": 3}, "client": {"type": "train"}, "model": "policy", "sampling": {}}
    assert msgspec.msgpack.decode(cancel_request(b"0a")) == {"request_id": "0a"}
