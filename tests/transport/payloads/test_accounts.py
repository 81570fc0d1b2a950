"""Every payload is released exactly once, whatever becomes of the rollout that it belongs to."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailrace.errors import TransportError
from tailrace.records import PayloadChunk, PayloadRef
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.payloads.store import MemoryPayloadStore


class RecordingStore(MemoryPayloadStore):
    """Counts what is released."""

    def __init__(self) -> None:
        super().__init__()
        self.releases: Counter[str] = Counter()
        self.calls = 0
        self.refs: list[PayloadRef] = []

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        ref = super().put(array)
        self.refs.append(ref)
        return ref

    def release(self, refs: Iterable[PayloadRef]) -> None:
        refs = list(refs)
        self.calls += 1
        self.releases.update(ref.uri for ref in refs)
        super().release(refs)


def chunk_of(store: MemoryPayloadStore, num_bytes: int = 8) -> PayloadChunk:
    return PayloadChunk(0, num_bytes, store.put(np.zeros(num_bytes, np.uint8)))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["record", "again", "drop", "drop again", "release"]), st.sampled_from("abc")),
    max_size=30,
)


@given(actions=ACTIONS)
@settings(deadline=None)
def test_every_payload_is_released_once_and_none_before_its_owner_ended(actions: list[tuple[str, str]]) -> None:
    asyncio.run(keep_accounts(actions))


async def keep_accounts(actions: list[tuple[str, str]]) -> None:
    store, known = RecordingStore(), dict[str, list[PayloadChunk]]()
    accounts, ended = PayloadAccounts(store), set[str]()
    for action, owner in actions:
        if action == "record":
            known.setdefault(owner, []).append(chunk := chunk_of(store))
            accounts.record(owner, [chunk, PayloadChunk(8, 9)])
        elif action == "again" and owner not in ended:
            accounts.record(owner, known.get(owner, []))
        elif action == "drop":
            accounts.drop([chunk_of(store)])
        elif action == "drop again" and owner not in ended:
            accounts.drop(known.get(owner, []))
        elif action == "release":
            accounts.release(owner)
            ended.add(owner)
        figures = accounts.figures
        assert figures.recorded_bytes == figures.released_bytes + figures.held_bytes
        assert figures.held_bytes == 8 * sum(len(chunks) for name, chunks in known.items() if name not in ended)
    held = [chunk.ref for owner, chunks in known.items() if owner not in ended for chunk in chunks]
    assert all(ref is not None and store.releases[ref.uri] == 0 for ref in held)
    await accounts.close()
    assert set(store.releases.values()) <= {1}
    assert not any(map(store.holds, store.refs))


async def test_what_a_retained_batch_needs_outlives_its_owners_and_ends_with_the_batch() -> None:
    store = RecordingStore()
    accounts = PayloadAccounts(store)
    for owner in "abc":
        accounts.record(owner, [chunk_of(store)])
    assert accounts.keep(1, ["a", "b", "without any"]) == 16
    for owner in "ac":
        accounts.release(owner)
    assert accounts.figures.held_bytes == 16  # b goes on, a is needed
    accounts.let_go(1)
    assert accounts.figures.held_bytes == 8
    accounts.let_go(1)
    accounts.release("b")
    assert accounts.figures.held_bytes == 0
    accounts.record("d", [chunk_of(store)])
    accounts.keep(2, "d")
    accounts.release("d")
    await accounts.close()
    assert set(store.releases.values()) == {1}
    assert not any(map(store.holds, store.refs))


async def test_a_batch_lets_go_of_what_all_its_owners_held_at_once() -> None:
    store = RecordingStore()
    accounts = PayloadAccounts(store)
    for owner in "abcdef":
        accounts.record(owner, [chunk_of(store)])
    accounts.keep(1, "abcdef")
    for owner in "abcde":
        accounts.release(owner)
    accounts.let_go(1)
    accounts.let_go(1)
    await accounts.close()
    assert store.calls == 2  # and once for the one that had not ended
    assert set(store.releases.values()) == {1}


class SlowStore(RecordingStore):
    """Puts when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_put = threading.Event()

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        self.may_put.wait()
        return super().put(array)


async def test_what_arrived_for_a_rollout_that_was_cancelled_meanwhile_is_released() -> None:
    store = SlowStore()
    accounts = PayloadAccounts(store)
    putting = asyncio.create_task(accounts.put("a", np.zeros(8, np.uint8)))
    await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    accounts.release("a")
    store.may_put.set()
    assert await accounts.put("b", np.zeros(8, np.uint8)) is not None  # after the first one, in the same thread
    assert accounts.figures.held_bytes == 8
    await accounts.close()
    assert not any(map(store.holds, store.refs))


class FullStore(MemoryPayloadStore):
    """Has no room."""

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        raise TransportError("no room")


async def test_without_room_a_completion_goes_on_without_its_payload(caplog: pytest.LogCaptureFixture) -> None:
    accounts = PayloadAccounts(FullStore())
    assert [await accounts.put("a", np.zeros(8, np.uint8)) for _ in range(5)] == [None] * 5
    assert [record.message for record in caplog.records] == [f"{n} payloads were not kept: no room" for n in (1, 2, 4)]
    await accounts.close()
