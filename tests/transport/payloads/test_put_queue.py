from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
from numpy.typing import NDArray

from tailrace.records import PayloadRef
from tailrace.transport.payloads.put_queue import PUTS_AT_ONCE, PutQueue
from tailrace.transport.payloads.store import MemoryPayloadStore


class GatedStore(MemoryPayloadStore):
    """Puts nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        self.gate.wait()
        return super().put(array)


async def test_those_who_wait_for_payloads_that_are_put_together_go_on_in_turns_of_the_loop_of_their_own() -> None:
    loop, store = asyncio.get_running_loop(), GatedStore()
    queue, turn, seen = PutQueue(store), 0, []

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if len(seen) < PUTS_AT_ONCE:
            loop.call_soon(next_turn)

    puts = [queue.put(np.zeros(8, np.uint8)) for _ in range(PUTS_AT_ONCE)]
    for put in puts:
        put.add_done_callback(lambda _: seen.append(turn))
    next_turn()
    store.gate.set()
    refs = await asyncio.gather(*puts)
    await queue.close()
    assert len({ref.uri for ref in refs}) == PUTS_AT_ONCE
    assert len(set(seen)) >= PUTS_AT_ONCE // 2  # the first ones may have been taken before the others came


async def test_closing_waits_until_everybody_was_told() -> None:
    store = GatedStore()
    queue, told = PutQueue(store), []
    puts = [queue.put(np.zeros(8, np.uint8)) for _ in range(PUTS_AT_ONCE)]
    for put in puts:
        put.add_done_callback(lambda future: told.append(future.result().uri))

    def slow_turn() -> None:
        time.sleep(0.002)  # the thread is long done when the loop has told but a few
        if len(told) < PUTS_AT_ONCE:
            asyncio.get_running_loop().call_soon(slow_turn)

    slow_turn()
    store.gate.set()
    await queue.close()
    assert len(set(told)) == PUTS_AT_ONCE
