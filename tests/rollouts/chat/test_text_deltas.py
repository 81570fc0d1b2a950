from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.records import Completion, FinishReason
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.chat.replies import read_reply
from tailrace.rollouts.chat.text_deltas import TextDeltas

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PIECES = [CALL, "Ada", " and ", "<", "think>", "<tool_", "call>", "\n", "é", "日本", "🙂", "st", "op", " ", "s"]


def chunk(token_ids: list[int]) -> Completion:
    size = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(size, np.float32),
        policy_versions=np.zeros(size, np.int32),
        finish_reason=FinishReason.RUNNING,
    )


def heard(renderer: ChatRenderer, token_ids: list[int], sizes: list[int], stop: list[str]) -> str:
    said: list[str] = []
    deltas = TextDeltas(said.append, decode=renderer.text, stop_token_ids=renderer.stop_token_ids, stop=stop)
    start = 0
    for size in [*sizes, len(token_ids)]:
        deltas(chunk(token_ids[start : start + size]))
        start += size
    return "".join(said)


@settings(max_examples=200)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    sizes=st.lists(st.integers(1, 4), max_size=40),
    stop=st.lists(st.sampled_from(["stop", "Ada a", "🙂"]), max_size=2),
    lone_bytes=st.booleans(),
)
def test_what_is_streamed_is_the_beginning_of_what_the_reply_says_up_to_what_may_be_a_marker(
    renderer_of: Callable[[str], ChatRenderer], pieces: list[str], sizes: list[int], stop: list[str], lone_bytes: bool
) -> None:
    renderer = renderer_of("chatml")
    token_ids = renderer.tokenizer.encode("".join(pieces))
    if lone_bytes:
        token_ids = [token for token in token_ids if token % 5]
    text = renderer.text(token_ids)
    ends = [text.index(one) for one in [*stop, "<think>", "<tool_call>"] if one in text]
    said = heard(renderer, [*token_ids, renderer.stop_token_ids[0]], sizes, stop)
    assert text[: min(ends, default=len(text))].startswith(said)
    if "\ufffd" not in text:
        first = {"<", *(one[0] for one in stop)}
        assert said.startswith("".join(takewhile(lambda character: character not in first, text)).rstrip())
    strings = [text.index(one) for one in stop if one in text]
    assert read_reply(text[: min(strings, default=len(text))]).content.startswith(said)


def test_plain_text_is_streamed_whole_but_for_what_may_become_a_marker(renderer: ChatRenderer) -> None:
    token_ids = renderer.tokenizer.encode("Ada, 日本 <3 and <tool")
    assert heard(renderer, token_ids, [1] * 99, []) == "Ada, 日本 <3 and"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n \n<think>hm</think>\n\nAda", ""),
        ("\n \n<tool_call>{}</tool_call>", ""),
        (f"\n Ada \n{CALL} and Bob", "\n Ada"),
        ("\n \nstop", ""),
        ("\n \nAda <3\n\n", "\n \nAda <3"),
        ("\n \n", ""),
    ],
)
def test_white_space_is_streamed_with_what_follows_it_or_stays_with_the_reply(
    renderer: ChatRenderer, text: str, said: str
) -> None:
    token_ids = renderer.tokenizer.encode(text)
    assert heard(renderer, token_ids, [1] * 99, ["stop"]) == said
