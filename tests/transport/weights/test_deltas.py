"""A delta makes the second file of the first, bit for bit, and what is no delta changes nothing unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CorruptData
from tailrace.transport.weights import deltas
from tailrace.transport.weights.deltas import SECTION_BYTES, apply_delta, digest_of, encode_delta

SHARES = st.sampled_from([0.0, 1e-4, 0.02, 0.12, 0.13, 0.6, 1.0])


@pytest.fixture(autouse=True, scope="module")
def short_sections() -> Iterator[None]:
    """So that small files have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "SECTION_BYTES", 1000)
        yield


def files(seed: int, num_bytes: int, shares: list[float]) -> tuple[bytes, bytes]:
    """One of random bytes, and one of which these shares of every fourth byte differ."""
    generator = np.random.default_rng(seed)
    first = generator.integers(0, 256, num_bytes).astype(np.uint8)
    second = first.copy()
    for plane, share in enumerate(shares):
        changed = generator.random(len(second[plane::4])) < share
        second[plane::4][changed] ^= generator.integers(1, 256, int(changed.sum())).astype(np.uint8)
    return first.tobytes(), second.tobytes()


def encoded(first: bytes, second: bytes, max_share: float = 1000.0) -> deltas.Delta | None:
    """Short files have longer deltas than they are."""
    return encode_delta(memoryview(first), memoryview(second), max_share=max_share)


def applied(first: bytes, delta: bytes) -> bytes:
    content = bytearray(first)
    apply_delta(memoryview(content), memoryview(delta))
    return bytes(content)


@given(
    st.integers(0, 2**31), st.integers(1, 1250).map(lambda words: 4 * words), st.lists(SHARES, min_size=4, max_size=4)
)
def test_any_two_files_of_one_length(seed: int, num_bytes: int, shares: list[float]) -> None:
    first, second = files(seed, num_bytes, shares)
    delta = encoded(first, second)
    assert delta is not None
    assert applied(first, delta.content) == second
    differing = np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)
    assert delta.changed_bytes == np.count_nonzero(differing)
    assert (digest_of(memoryview(first)) == digest_of(memoryview(second))) == (first == second)


def test_what_changed_little_is_short_and_what_changed_much_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "SECTION_BYTES", SECTION_BYTES)
    size = 4 * SECTION_BYTES + 12
    equal, few, half = (files(1, size, shares) for shares in ([0.0] * 4, [0.01, 0, 0.01, 0], [1.0, 1.0, 0, 0]))
    assert len(encoded(*equal).content) < 1000
    assert len(encoded(*few).content) < 0.02 * size
    assert len(encoded(*half).content) < 0.501 * size
    assert encoded(*half, max_share=0.4) is None
    assert encoded(half[0], half[1][:-4]) is None
    assert encoded(half[0][:-1], half[1][:-1]) is None


def test_a_file_that_changed_only_between_the_sections_looked_at_first_is_measured_whole() -> None:
    first, second = files(1, 100_000, [0.0] * 4)
    second = bytearray(second)
    second[3000:9000] = bytes(byte ^ 255 for byte in second[3000:9000])
    assert encoded(first, bytes(second), max_share=0.03) is None


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_damage_raises_or_shows_in_the_digest(seed: int, where: int) -> None:
    first, second = files(seed, 3004, [0.02, 0.5, 0.0, 0.02])
    delta = bytearray(encoded(first, second).content)
    delta[where % len(delta)] ^= 1 + seed % 255
    try:
        found = applied(first, bytes(delta))
    except CorruptData:
        return
    assert digest_of(memoryview(found)) != digest_of(memoryview(second)) or found == second


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_a_delta_cut_short_or_of_another_file_is_refused(cut: int) -> None:
    first, second = files(1, 3000, [0.02, 0.5, 0.0, 0.02])
    delta = encoded(first, second).content
    with pytest.raises(CorruptData):
        applied(first, delta[:cut])
    with pytest.raises(CorruptData):
        applied(first, delta + b"\0")
    with pytest.raises(CorruptData):
        applied(first[:-1], delta)
