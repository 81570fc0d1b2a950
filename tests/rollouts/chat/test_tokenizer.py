from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import ModelError
from tailrace.rollouts import ChatRenderer, ChatTokenizer
from tests.rollouts.conftest import TEMPLATES
from tests.support.chat_models import CHATML, save_chat_model

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Sort: Bob, Ada. <|im_end|> ünï"},
    {"role": "assistant", "content": "Ada, Bob"},
    {"role": "user", "content": "and Cleo?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_become_the_tokens_that_transformers_makes_of_them(template: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = save_chat_model(tmp_path, template=TEMPLATES[template])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTokenizer(folder)
    for tools in (None, TOOLS):
        for add_generation_prompt in (True, False):
            options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
            assert ours.encode(ours.template.render(CONVERSATION, **options)) == list(
                theirs.apply_chat_template(CONVERSATION, return_dict=False, **options)
            )
    assert ours.eos_token_id == theirs.eos_token_id


def test_it_satisfies_the_protocols_of_the_renderers_package(tmp_path: Path) -> None:
    from renderers.base import OffsetTokenizer, Tokenizer

    tokenizer = ChatTokenizer(save_chat_model(tmp_path))
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(tokenizer, OffsetTokenizer)
    encoding = tokenizer("Ada, Bob", return_offsets_mapping=True)
    assert "".join("Ada, Bob"[start:end] for start, end in encoding["offset_mapping"]) == "Ada, Bob"
    assert encoding["input_ids"] == tokenizer.encode("Ada, Bob")


def test_a_token_that_is_not_there_has_no_id(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path))
    assert tokenizer.convert_tokens_to_ids("<|nothing|>") is None
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]


def test_a_model_without_a_chat_template_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no chat template.*instruct variant"):
        ChatTokenizer(save_chat_model(tmp_path, template=None))


def test_a_folder_without_a_tokenizer_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json.*save_pretrained"):
        ChatTokenizer(tmp_path)


def test_a_broken_chat_template_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not compile \(line 2\)"):
        ChatTokenizer(save_chat_model(tmp_path, template="ok\n{% for %}"))


def test_a_template_may_stand_inside_the_tokenizers_settings(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template=None)
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": named}))
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.template.render(CONVERSATION, tools=TOOLS) == "1 tools"
    assert tokenizer.template.render(CONVERSATION[:1]).startswith("<|im_start|>user")


def test_a_template_cannot_reach_beyond_its_sandbox(tmp_path: Path) -> None:
    from jinja2.exceptions import SecurityError

    folder = save_chat_model(tmp_path, template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(SecurityError):
        ChatTokenizer(folder).template.render(CONVERSATION)


def test_what_only_marks_generated_text_renders_as_its_body(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    tokenizer = ChatTokenizer(save_chat_model(tmp_path, template=template))
    assert tokenizer.template.render([{"role": "user", "content": "hi"}]) == "[hi]"


def test_every_token_that_the_models_files_say_ends_a_reply_is_a_stop_token(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert set(ChatRenderer(folder).stop_token_ids) == {2, 0, 7}  # 2: with which the template closes a reply


def test_a_tokenizer_without_a_token_that_ends_a_reply_is_refused(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, template="{% for m in messages %}{{ m.role + ': ' + m.content }} {% endfor %}")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="names a token that ends a reply; set eos_token"):
        ChatRenderer(folder)
