"""A model that keeps a state in place of keys and values."""

from __future__ import annotations

from pathlib import Path

from transformers import MambaConfig, MambaForCausalLM

from tests.support.chat_models import save_chat_model


def save_state_model(folder: Path) -> Path:
    """A tiny Mamba with a tokenizer and a chat template."""
    config = MambaConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)
    own = (folder / "config.json").read_text()
    (save_chat_model(folder) / "config.json").write_text(own)
    return folder
