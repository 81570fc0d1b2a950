"""A prompt's log-probabilities are read in pieces: the same ones whatever a piece's length; others have their turn."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.records import as_token_ids
from tailrace.rollouts.scoring.teacher.prompt_logprobs import read_prompt_logprobs
from tests.support.teacher_endpoint import likelihood, prompt_logprobs

TRICKY = ['}},{"5":', '"prompt_logprobs":[', "}},{", '"', "\\", "é}}", '{"5":{"logprob":0}}},{"6":{']


def answer_of(token_ids: list[int], top_k: int = 0, text: str = "x") -> bytes:
    return prompt_logprobs(token_ids, top_k, text).body


@given(
    token_ids=st.lists(st.integers(0, 20), min_size=1, max_size=40),
    piece_bytes=st.integers(0, 600),
    text=st.sampled_from(TRICKY) | st.text(max_size=8),
    top_k=st.integers(0, 3),
    spaced=st.booleans(),
)
@settings(max_examples=200)
async def test_pieces_of_any_size_say_what_the_whole_says(
    token_ids: list[int], piece_bytes: int, text: str, top_k: int, *, spaced: bool
) -> None:
    answer = answer_of(token_ids, top_k, text)
    if not spaced:
        answer = json.dumps(json.loads(answer), separators=(",", ":"), ensure_ascii=False).encode()
    found = await read_prompt_logprobs(
        answer, as_token_ids(token_ids), top_k=top_k, vocabulary=99, piece_bytes=piece_bytes
    )
    whole = await read_prompt_logprobs(answer, as_token_ids(token_ids), top_k=top_k, vocabulary=99, piece_bytes=1 << 30)
    np.testing.assert_array_equal(found.logprobs, whole.logprobs)
    np.testing.assert_array_equal(found.top_ids, whole.top_ids)
    np.testing.assert_array_equal(found.top_logprobs, whole.top_logprobs)
    if not top_k:
        np.testing.assert_allclose(found.logprobs[1:], [likelihood(one) for one in token_ids[1:]], rtol=1e-6)


async def test_others_have_their_turn_while_a_long_answer_is_read() -> None:
    token_ids, turns = list(range(20_000)), 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    answer = answer_of(token_ids)
    await read_prompt_logprobs(answer, as_token_ids(token_ids), top_k=0, vocabulary=99_999)
    other.cancel()
    assert turns >= len(answer) // (80 << 10)


NOT_ITS_OWN = "a token has no log-probability of its own"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `choices`"),
        (b'{"choices": []}', "no choice"),
        (b'{"choices": [{"prompt_logprobs": null}]}', "0 log-probabilities for 3 tokens"),
        (b'{"choices": [{"prompt_logprobs": [null, {"x": {"logprob": 0}}, null]}]}', "Expected `int`, got `str`"),
        (answer_of([1, 2, 3])[:-3], "truncated"),
        (answer_of([1, 2]), "2 log-probabilities for 3 tokens"),
        (answer_of([1, 2, 3, 4]), "4 log-probabilities for 3 tokens"),
        (answer_of([1, 5, 3]), NOT_ITS_OWN),
        (answer_of([1, 2, 3]).replace(b"null, ", b""), NOT_ITS_OWN),
        (
            answer_of([1, 2, 3]).replace(b'"3": {', b'"3": {"logprob": null, "other": {').replace(b"}}]", b"}}}]"),
            "Expected `float`, got `null`",
        ),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
async def test_anything_else_is_refused(answer: bytes, why: str, piece_bytes: int) -> None:
    import msgspec

    with pytest.raises((ValueError, msgspec.MsgspecError), match=why):
        await read_prompt_logprobs(answer, as_token_ids([1, 2, 3]), top_k=0, vocabulary=99, piece_bytes=piece_bytes)
