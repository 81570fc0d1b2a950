"""Which models are rendered and read by their family's renderer, and what the others' tool calls become."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
from typing_extensions import override

from tailrace.errors import ModelError
from tailrace.models.loading import copy_tokenizer
from tailrace.records import Completion, FinishReason, Message, ToolCall, ToolSpec, as_token_ids
from tailrace.rollouts import ChatRenderer, ChatTokenizer
from tailrace.rollouts.chat import ParsedReply
from tests.rollouts.conftest import QWEN3
from tests.support.chat_models import (
    HARMONY,
    HERMES,
    LLAMA3,
    LLAMA3_MARKERS,
    QWEN35,
    QWEN35_MARKERS,
    STRICT,
    save_chat_model,
)

QUESTION: list[Message] = [{"role": "user", "content": "1 + 2?"}]
CALL = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
ADD = ToolSpec(
    name="add", description="The sum.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}
)


def replied(renderer: ChatRenderer, text: str) -> ParsedReply:
    """What a completion with this text says, where a tool was offered."""
    token_ids = as_token_ids([*renderer.tokenizer.encode(text), renderer.stop_token_ids[0]])
    sampled = Completion(token_ids, np.zeros(len(token_ids), np.float32), token_ids, FinishReason.STOP)
    return renderer.parse(sampled, prompt_token_ids=renderer.render(QUESTION, [ADD]), tools=[ADD])


class HarmonyTokenizer(ChatTokenizer):
    """Of gpt-oss: its renderer has the vocabulary itself."""

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        super().__init__(folder, name=name)
        self._harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        ends = ["<|return|>", "<|call|>", "<|constrain|>"]
        self.added_token_ids = frozenset(self._harmony.encode("".join(ends), allowed_special="all"))

    @override
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._harmony.encode(text, allowed_special="all"))

    @override
    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return str(self._harmony.decode(token_ids))

    @override
    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.encode(tokens)[0]


@pytest.fixture
def harmony(tmp_path: Path) -> Callable[..., ChatTokenizer]:
    """Makes a tokenizer of gpt-oss, by any name. Skips where its vocabulary is not there."""
    try:
        load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except HarmonyError as error:
        pytest.skip(f"the vocabulary of gpt-oss cannot be fetched: {error}")
    return partial(HarmonyTokenizer, save_chat_model(tmp_path, template=HARMONY))


def test_a_models_family_is_known_by_its_public_name(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template=HERMES)
    assert set(ChatRenderer(folder, name=QWEN3).stop_token_ids) == {2, 0}  # the family's, of which one is not named
    assert ChatRenderer(folder).stop_token_ids == (2,)


def test_a_fine_tune_with_a_template_of_its_own_is_rendered_by_it(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template=STRICT, name=QWEN3)
    renderer = ChatRenderer(folder)
    text = renderer.tokenizer.decode(renderer.render([{"role": "user", "content": "hi"}]).tolist())
    assert text == "[user]hi<|im_end|>[assistant]"


def test_the_public_name_in_a_folders_files_counts_before_a_path_to_it(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template=HERMES, name=QWEN3)
    assert ChatRenderer(folder, name=str(folder)).chat_format.family == "qwen3"


def test_a_copy_of_a_model_keeps_its_family(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model", template=HERMES, name=QWEN3)
    checkpoint = save_chat_model(tmp_path / "checkpoint", template=HERMES)
    copy_tokenizer(str(model), checkpoint)
    assert ChatRenderer(checkpoint).chat_format.family == "qwen3"


def test_a_local_copy_without_a_name_is_known_by_how_its_template_shows_the_use_of_tools(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template=QWEN35, markers=QWEN35_MARKERS)
    renderer = ChatRenderer(folder, name=str(folder))
    assert renderer.chat_format.family == "qwen3.5"
    reply = replied(renderer, f"Hm.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>")
    assert [call["function"] for call in reply.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]
    assert not reply.malformed_tool_calls


def test_every_day_is_the_same_day_to_a_template(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    renderer = ChatRenderer(save_chat_model(tmp_path, template=template))
    assert renderer.tokenizer.decode(renderer.render(QUESTION).tolist()) == "26 Jul 20241 + 2?<|im_end|>"


def test_a_family_whose_template_asks_for_the_day_keeps_its_renderer(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template=LLAMA3, markers=LLAMA3_MARKERS)
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = ChatRenderer(folder, name="meta-llama/Llama-3.2-1B-Instruct")
    assert renderer.chat_format.family == "llama-3"
    reply = replied(renderer, '{"name": "add", "parameters": {"a": 1}}')
    assert [call["function"] for call in reply.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "models/gpt-oss-mine"])
def test_gpt_oss_keeps_its_renderer_though_its_prompt_goes_on_where_the_template_ends(
    harmony: Callable[..., ChatTokenizer], name: str
) -> None:
    renderer = ChatRenderer(harmony(name=name))
    prompt = renderer.tokenizer.decode(renderer.render(QUESTION).tolist())
    assert "Current date: 2024-07-26" in prompt
    assert prompt.endswith("<|start|>assistant<|channel|>analysis<|message|>")


def test_gpt_oss_is_shown_which_function_a_result_is_of(harmony: Callable[..., ChatTokenizer]) -> None:
    renderer = ChatRenderer(harmony(name="openai/gpt-oss-20b"))
    call: ToolCall = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    history: list[Message] = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result: Message = {"role": "tool", "content": "3", "tool_call_id": "call_0"}
    prompt = renderer.render(QUESTION, [ADD])
    said = (
        '3.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    token_ids = np.concatenate([prompt, as_token_ids(renderer.tokenizer.encode(said))])
    bridged = renderer.bridge(token_ids, len(prompt), history, [result], [ADD])
    assert bridged is not None
    for shown in (bridged, renderer.render([*history, result], [ADD])):
        assert "<|start|>functions.add<|channel|>" in renderer.tokenizer.decode(shown.tolist())


def test_gpt_oss_without_its_vocabulary_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path, template=HARMONY), name="openai/gpt-oss-20b")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "/nowhere")
    with pytest.raises(ModelError, match=r"openai/gpt-oss-20b: the vocabulary .*TIKTOKEN_ENCODINGS_BASE"):
        ChatRenderer(tokenizer)


def test_tools_for_a_model_whose_calls_are_not_read_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_chat_model(tmp_path / "other", template=HERMES.replace("<tool_call>\n", "[TOOL_CALLS]"))
    renderer = ChatRenderer(other)
    renderer.render(QUESTION)
    assert not caplog.messages
    for _ in range(2):
        renderer.render(QUESTION, [ADD])
    (warning,) = caplog.messages
    assert "only those are read" in warning

    caplog.clear()
    ChatRenderer(save_chat_model(tmp_path / "hermes", template=HERMES)).render(QUESTION, [ADD])
    assert not caplog.messages
