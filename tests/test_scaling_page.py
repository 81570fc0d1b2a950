"""The table of bytes per link in docs/scaling.md is what its function works out, and what the formats say."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tailrace.generation.rpc.messages import CompletionReply, GenerateCall
from tailrace.records import Completion, FinishReason, GenerationRequest, GroupId, RequestId, SamplingParams, SessionId
from tailrace.transport import channels

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("link_bytes", ROOT / "benchmarks" / "link_bytes.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["link_bytes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["link_bytes"]


def test_its_examples_hold(arithmetic: ModuleType) -> None:
    found = doctest.testmod(arithmetic)
    assert found.attempted > 4
    assert not found.failed


def test_the_page_has_its_table(arithmetic: ModuleType) -> None:
    assert "\n".join(arithmetic.table(arithmetic.Load())) in (ROOT / "docs" / "scaling.md").read_text()


def test_messages_are_as_long_as_it_counts(arithmetic: ModuleType) -> None:
    count = 8_000
    request = GenerationRequest(
        RequestId("rollout-12.0"), SessionId("s"), GroupId("g"), np.zeros(count, np.int32), SamplingParams(max_tokens=9)
    )
    completion = Completion(
        np.zeros(count, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), FinishReason.STOP
    )
    call = len(channels.encode(GenerateCall(call_id=1, request=request)))
    reply = len(channels.encode(CompletionReply(call_id=1, completion=completion)))
    assert call == pytest.approx(arithmetic.REQUEST_BYTES + count * arithmetic.REQUEST_TOKEN_BYTES, rel=0.01)
    assert reply == pytest.approx(arithmetic.REPLY_BYTES + count * arithmetic.REPLY_TOKEN_BYTES, rel=0.01)
