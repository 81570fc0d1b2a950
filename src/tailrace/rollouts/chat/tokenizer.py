"""A model's tokenizer for the orchestrator: `tokenizers` and Jinja, no torch, no transformers.

Satisfies the `Tokenizer` and `OffsetTokenizer` protocols of the package `renderers`.
Read from a folder with `tokenizer.json`, `tokenizer_config.json` and (where they are not inside the latter)
`chat_template.jinja` and `additional_chat_templates/`, the layout in which Hugging Face models are saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

from tokenizers import Tokenizer

from tailrace.errors import ModelError
from tailrace.models.files import NAMED_TEMPLATES, is_public, own_context, public_name, read_json
from tailrace.records import Json
from tailrace.rollouts.chat.template import DEFAULT, ChatTemplate

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Text to tokens and back, and conversations to either.

    `name_or_path` is the name under which the model's own renderer would be known (`Qwen/Qwen3-0.6B`), where the caller
    or the folder tells it, and what the caller calls it otherwise.
    """

    def __init__(self, folder: str | Path, *, name: str | None = None) -> None:
        """Read a model's folder; `name` is what the model is called, which counts before the folder where it is public.

        Raises `ModelError` for what is missing, saying what to do.
        """
        # one text at a time: a thread pool would only fight with the engine's threads, and warn at every fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.folder = folder = Path(folder)
        config, model_config = read_json(folder / "tokenizer_config.json"), read_json(folder / "config.json")
        self._tokenizer = _load(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        own_name = str(name or folder)
        self.name_or_path = own_name if name and is_public(name) else public_name(folder) or own_name
        self.special_tokens = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
        """By role: `eos_token`, `bos_token`, ..."""
        self.eos_token_id = self._special_id("eos_token")
        self.unk_token_id = self._special_id("unk_token")
        self.added_token_ids: frozenset[int] = frozenset(self._tokenizer.get_added_tokens_decoder())
        """Tokens that stand for themselves (`<|im_end|>`, `<tool_call>`, ...), never merged from text."""
        known_ends = [] if self.eos_token_id is None else [self.eos_token_id]
        known_ends += _end_token_ids(read_json(folder / "generation_config.json"), model_config)
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys(known_ends))
        """Tokens that the model's files say end a reply; the end-of-sequence token first."""
        self.own_context = own_context(model_config)
        """Tokens that the model was made for, where its files say so."""
        self.template = ChatTemplate(_chat_templates(folder, config), self.special_tokens)

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, added ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`, by default without special tokens around it."""
        # the batch call skips the offsets, a third of the time
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Text of `token_ids`, exactly: spaces are never cleaned up (the last argument is there for the protocol)."""
        del clean_up_tokenization_spaces
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """The id of a token's text; that of the unknown token (or None) where there is no such token."""
        if isinstance(tokens, str):
            token_id = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if token_id is None else int(token_id)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = False
    ) -> dict[str, Json]:
        """`input_ids`, and where asked for `offset_mapping`: each token's characters as (start, end)."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        result: dict[str, Json] = {"input_ids": encoding.ids}
        if return_offsets_mapping:
            result["offset_mapping"] = encoding.offsets
        return result

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error


def _chat_templates(folder: Path, config: Mapping[str, Json]) -> dict[str, str]:
    """Every named chat template; files win over the tokenizer's settings, as in transformers."""
    inside = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inside, str):
        templates[DEFAULT] = inside
    elif isinstance(inside, list):
        templates.update({entry["name"]: entry["template"] for entry in inside})
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates[DEFAULT] = path.read_text(encoding="utf-8")
    for extra in sorted(folder.glob(NAMED_TEMPLATES)):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    if DEFAULT not in templates:
        raise ModelError(
            f"the model in {folder} has no chat template (it may be a base model); use its instruct variant, "
            f"or put a chat template into {path}"
        )
    return templates


def _special_tokens(*sources: Mapping[str, Json]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _end_token_ids(*sources: Mapping[str, Json]) -> list[int]:
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return ids
