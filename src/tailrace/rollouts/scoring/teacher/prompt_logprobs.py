"""Reads the log-probabilities of a prompt from the answer of an endpoint, without holding the event loop.

The answer has an object for each token, `{"id": {"logprob": -0.1, ...}, ...}`, which makes megabytes of a long branch.
It is decoded in pieces, and others have their turn between two of them. A piece ends where an object does: at
`}}, {"5"`, which stands in no string, since a quote is escaped there, and one that ends the string is not followed by
a digit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import msgspec
import numpy as np

from tailrace.records import Int32Array, TokenScores

_PIECE_BYTES = 64 << 10

_BEGIN = re.compile(rb'"prompt_logprobs"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*\}\s*(,)\s*\{\s*"\d+"\s*:')


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _Completions(msgspec.Struct):
    choices: list[_Choice]


_decode_piece = msgspec.json.Decoder(list[dict[int, _Logprob] | None]).decode
_decode_completions = msgspec.json.Decoder(_Completions).decode


async def read_prompt_logprobs(
    answer: bytes, token_ids: Int32Array, *, top_k: int, vocabulary: int, piece_bytes: int = _PIECE_BYTES
) -> TokenScores:
    """Of the tokens that were sent, from what `POST /completions` answered to `prompt_logprobs`.

    Raises `ValueError` where it is something else, or not of these tokens.
    """
    parts, count = list[TokenScores](), 0
    for piece in _decoded(answer, piece_bytes):
        tokens = token_ids[count : count + len(piece)]
        count += len(piece)
        if len(tokens) != len(piece):
            break
        counts = np.array([len(entries or ()) for entries in piece], np.int64)
        if parts or not len(piece) or piece[0] is not None:  # only the very first token has nothing before it
            own = tokens
        else:
            parts.append(TokenScores.unknown(1, top_k))
            own, counts = tokens[1:], counts[1:]
        ids = [token_id for entries in piece if entries for token_id in entries]
        logprobs = [entry.logprob for entries in piece if entries for entry in entries.values()]
        columns = np.array(ids, np.int64), np.array(logprobs, np.float32)
        parts.append(TokenScores.of_entries(own, counts, *columns, top_k=top_k, vocabulary=vocabulary))
        await asyncio.sleep(0)
    if count != len(token_ids):
        raise ValueError(f"{count} log-probabilities for {len(token_ids)} tokens")
    return TokenScores.joined(parts)


def _decoded(answer: bytes, piece_bytes: int) -> Iterator[list[dict[int, _Logprob] | None]]:
    """The entries of the tokens, some at a time. Raises `ValueError`.

    What is left after the last whole piece is put in the place of all, so that the rest of the answer is read with it.
    """
    begin = _BEGIN.search(answer)
    start = 0 if begin is None else begin.end()
    at = start
    while begin is not None and (end := _BETWEEN.search(answer, at + piece_bytes)) is not None:
        yield _decode_piece(b"[%b]" % answer[at : end.start(1)])
        at = end.end(1)
    rest = _decode_completions(answer[:start] + answer[at:])
    if not rest.choices:
        raise ValueError("no choice")
    yield rest.choices[0].prompt_logprobs or []
