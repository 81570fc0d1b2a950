"""Models made of the bundled one, which speak its tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tailrace.models.loading import copy_tokenizer, load_causal_lm, resolve_model

BUNDLED = "bundled:quickstart"


def save_with_other_weights(folder: Path) -> str:
    """The same architecture with other weights."""
    model = load_causal_lm(BUNDLED, dtype="float32")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    copy_tokenizer(BUNDLED, folder)
    return str(folder)


def save_smaller(folder: Path) -> str:
    """The same kind of architecture with one layer, and random weights."""
    config = load_causal_lm(BUNDLED, dtype="float32").config
    config.num_hidden_layers = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    copy_tokenizer(BUNDLED, folder)
    return str(folder)


def copy_bundled(folder: Path, *, drop_token: bool = False, **changes: int) -> Path:
    """The bundled model with another config, or one token less."""
    shutil.copytree(resolve_model(BUNDLED).location, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if drop_token:
        rename_a_token(folder)
    return folder


def rename_a_token(folder: Path) -> None:
    """Another vocabulary for the model that lies there: one of its tokens is called otherwise."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|another|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
