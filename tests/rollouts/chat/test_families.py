"""Which models are rendered and read by their family's renderer, and what the others' tool calls become."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tailrace.models.loading import copy_tokenizer
from tailrace.records import Completion, FinishReason, Message, ToolSpec, as_token_ids
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.chat import ParsedReply
from tests.rollouts.conftest import QWEN3
from tests.support.chat_models import HERMES, QWEN35, QWEN35_MARKERS, STRICT, save_chat_model

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
