from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tailrace.generation.completions import head, tail
from tailrace.records import Completion, FinishReason
from tailrace.rollouts.chat.stop_strings import StopStringFound, StopStrings

WORDS = ["▁ok", "a", "Human", ":", "日本"]


def byte_fallback_tokenizer() -> Tokenizer:
    """Decodes as that of Llama 2, Mistral and Gemma: what is no word is a token for each byte."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZER = byte_fallback_tokenizer()
OK, A = 256, 257


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=False))


def sampled(token_ids: Sequence[int]) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(len(token_ids), np.float32),
        policy_versions=np.zeros(len(token_ids), np.int32),
        finish_reason=FinishReason.LENGTH,
    )


def listened(stop: Sequence[str], completion: Completion, sizes: Sequence[int]) -> tuple[Completion, StopStrings]:
    """What is left of a completion that comes in chunks of these sizes, and then what is left at once."""
    listener = StopStrings(stop, decode)
    starts = [0, *np.cumsum(sizes).tolist(), completion.num_tokens]
    try:
        for start, end in pairwise(min(start, completion.num_tokens) for start in starts):
            listener(tail(head(completion, end), start))
    except StopStringFound:
        return listener.completion, listener
    return listener.cut(completion), listener


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("rest", [[], [A, A, A], [*"😀".encode()], [*"😀😀".encode()[:7]]])
def test_a_stop_string_behind_characters_of_many_tokens_ends_the_reply_at_its_token(size: int, rest: list[int]) -> None:
    token_ids = [OK, *"😀😀\n".encode(), *rest]
    kept, listener = listened(["\n", "Human:"], sampled(token_ids), [size] * len(token_ids))
    assert (decode(kept.token_ids), listener.found) == ("ok😀😀\n", "\n")


pieces = st.sampled_from([*[[256 + place] for place in range(len(WORDS))], *map(list, map(str.encode, "\n😀é 日"))])


@settings(max_examples=300)
@given(
    parts=st.lists(pieces, max_size=12),
    sizes=st.lists(st.integers(1, 6), max_size=40),
    stop=st.lists(st.sampled_from(["\n", "Human:", "a\n", "😀", "é日", "a ok", " 日本"]), min_size=1, max_size=2),
    is_cut_off=st.booleans(),
)
def test_a_reply_ends_at_the_first_token_with_which_its_text_has_a_stop_string(
    parts: list[list[int]], sizes: list[int], stop: list[str], is_cut_off: bool
) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    token_ids = token_ids[:-1] if is_cut_off else token_ids  # within a character, maybe
    ends = [end for end in range(len(token_ids)) if any(one in decode(token_ids[: end + 1]) for one in stop)]
    expected = token_ids[: ends[0] + 1] if ends else token_ids
    for chunks in (sizes, [], [1] * len(token_ids)):
        kept, listener = listened(stop, sampled(token_ids), chunks)
        assert kept.token_ids.tolist() == expected
        assert (listener.found in stop) == bool(ends)


@settings(max_examples=300)
@given(
    token_ids=st.lists(st.sampled_from([10, 65, 0x9F, 0xF0, 0xFF, OK, A]), max_size=24),
    sizes=st.lists(st.integers(1, 6), max_size=24),
)
def test_bytes_that_are_no_text_end_a_reply_with_a_stop_string_or_not_at_all(
    token_ids: list[int], sizes: list[int]
) -> None:
    kept, listener = listened(["\n", "A"], sampled(token_ids), sizes)
    if listener.found is None:
        assert kept.token_ids.tolist() == token_ids
    else:
        assert listener.found in decode(kept.token_ids)
        assert kept.token_ids.tolist() == token_ids[: kept.num_tokens]
