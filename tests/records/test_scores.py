"""Scores of tokens: what entries say, whatever their order, and the same after a message."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.records import Completion, FinishReason, TokenScores
from tailrace.transport.channels import decode_array, encode

VOCABULARY = 12


class Message(msgspec.Struct):
    completion: Completion


def entries_of(token_id: int, data: st.DataObject) -> dict[int, float]:
    others = data.draw(st.lists(st.integers(0, 20), max_size=6))
    ids = data.draw(st.permutations(sorted({token_id, *others})))
    return {one: -0.25 * data.draw(st.integers(0, 40)) for one in ids}


@given(st.data(), st.lists(st.integers(0, 20), max_size=5), st.integers(0, 4))
def test_the_likeliest_are_named_in_falling_order(data: st.DataObject, token_ids: list[int], top_k: int) -> None:
    told = [entries_of(token_id, data) for token_id in token_ids]
    scores = TokenScores.of_entries(
        np.array(token_ids, np.int32),
        np.array([len(one) for one in told], np.int64),
        np.array([token_id for one in told for token_id in one], np.int64),
        np.array([logprob for one in told for logprob in one.values()], np.float32),
        top_k=top_k,
        vocabulary=VOCABULARY,
    )
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(token_ids), top_k)
    for row, (token_id, one) in enumerate(zip(token_ids, told, strict=True)):
        assert scores.logprobs[row] == one[token_id]
        likely = sorted((logprob for other, logprob in one.items() if other < VOCABULARY), reverse=True)[:top_k]
        named = [int(other) for other in scores.top_ids[row] if other >= 0]
        assert [one[other] for other in named] == likely == scores.top_logprobs[row][: len(likely)].tolist()
        assert len(set(named)) == len(named)
        assert not scores.top_logprobs[row][len(likely) :].any()


@pytest.mark.parametrize(("count", "top_k"), [(0, 0), (0, 3), (5, 0), (5, 3)])
def test_a_message_keeps_their_shape(count: int, top_k: int) -> None:
    scores = TokenScores.unknown(count, top_k)
    scores.top_logprobs[:] = np.arange(count * top_k).reshape(count, top_k)
    nothing = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)
    message = encode(Message(Completion(*nothing, FinishReason.LENGTH, scores=scores)))
    found = msgspec.msgpack.decode(message, type=Message, dec_hook=decode_array).completion.scores
    assert found is not None
    assert found.top_ids.shape == found.top_logprobs.shape == ((count, top_k) if count else (0, 0))
    assert found.top_logprobs.tolist() == scores.top_logprobs.tolist()


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="scores of 2 tokens came with"):
        TokenScores(np.zeros(2, np.float32), np.zeros((2, 3), np.int32), np.zeros((2, 2), np.float32))
    given = {"top_k": 1, "vocabulary": 9}
    one = np.array([5], np.int32), np.array([1], np.int64)
    with pytest.raises(ValueError, match="no log-probability of its own"):
        TokenScores.of_entries(*one, np.array([4]), np.array([-1.0], np.float32), **given)
    with pytest.raises(ValueError, match="not finite"):
        TokenScores.of_entries(*one, np.array([5]), np.array([np.nan], np.float32), **given)
