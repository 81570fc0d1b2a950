from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tailrace.generation.rpc.messages import AbortCall, AnyCall, Frames, UploadCall, unpack_calls
from tailrace.generation.rpc.outbox import MOST_TOGETHER, Outbox
from tailrace.generation.rpc.uploads import Upload


class Sent:
    """Messages as a socket would get them."""

    def __init__(self) -> None:
        self.messages: list[tuple[list[int], Frames]] = []
        self.outbox = Outbox[AnyCall](self._send)

    def _send(self, message: bytes, frames: Frames) -> None:
        self.messages.append(([call.call_id for call in unpack_calls(message)], frames))


async def test_what_one_turn_sends_is_one_message_in_order() -> None:
    sent = Sent()
    for call_id in range(3):
        sent.outbox.put(AbortCall(call_id=call_id))
    assert sent.messages == []
    await asyncio.sleep(0)
    sent.outbox.put(AbortCall(call_id=3))
    await asyncio.sleep(0)
    assert sent.messages == [([0, 1, 2], ()), ([3], ())]


async def test_a_part_with_frames_goes_alone_after_what_waits() -> None:
    sent = Sent()
    sent.outbox.put(AbortCall(call_id=0))
    sent.outbox.put(UploadCall(call_id=1, version=1, upload=Upload(2, "digest"), offset=0), [b"ab"])
    sent.outbox.put(AbortCall(call_id=2))
    await asyncio.sleep(0)
    assert sent.messages == [([0], ()), ([1], [b"ab"]), ([2], ())]


async def test_a_part_that_cannot_be_sent_costs_whoever_put_it_and_no_other_part() -> None:
    sent = Sent()
    sent.outbox.put(AbortCall(call_id=0))
    with pytest.raises(TypeError, match="a message cannot hold a int64"):
        sent.outbox.put(AbortCall(call_id=np.int64(1)))  # type: ignore[arg-type]
    sent.outbox.put(AbortCall(call_id=2))
    await asyncio.sleep(0)
    assert sent.messages == [([0, 2], ())]


async def test_a_message_is_bounded() -> None:
    sent = Sent()
    for call_id in range(MOST_TOGETHER + 1):
        sent.outbox.put(AbortCall(call_id=call_id))
    assert [len(calls) for calls, _ in sent.messages] == [MOST_TOGETHER]
    await asyncio.sleep(0)
    assert [len(calls) for calls, _ in sent.messages] == [MOST_TOGETHER, 1]
