"""Names of models become models, and names that are none become messages that help."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tailrace.errors import ModelError
from tailrace.models import loading


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(32)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def copied(folder: Path, into: Path, *, without: str = "") -> Path:
    into.mkdir()
    for file in folder.iterdir():
        if file.name != without:
            (into / file.name).write_bytes(file.read_bytes())
    return into


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_local_folder_loads_in_the_dtype_asked_for(model_folder: Path, dtype: loading.Dtype) -> None:
    model = loading.load_causal_lm(str(model_folder), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert not model.training


def test_a_local_folder_is_its_own_tokenizer_folder(model_folder: Path, tmp_path: Path) -> None:
    assert loading.tokenizer_folder(str(model_folder), tmp_path / "unused") == model_folder
    assert not (tmp_path / "unused").exists()


def test_a_tokenizer_is_copied_beside_weights(model_folder: Path, tmp_path: Path) -> None:
    loading.copy_tokenizer(str(model_folder), tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()
    loading.require_chat_template("copy", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./nowhere", "no folder and no .gguf file"),
        ("src/nowhere", "no folder and no .gguf file"),
        ("/nowhere/at/all", "no folder and no .gguf file"),
        ("a/b/c", "Hugging Face id"),
        ("missing.gguf", "no such file"),
        ("bundled:nothing", "no such bundled model"),
    ],
)
def test_a_name_that_is_no_model_is_refused_with_what_names_one(name: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        loading.resolve_model(name)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        loading.load_causal_lm(str(tmp_path), dtype="float32")


def test_a_model_without_a_chat_template_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = copied(model_folder, tmp_path / "silent", without="chat_template.jinja")
    with pytest.raises(ModelError, match="no chat template"):
        loading.load_tokenizer(str(folder))
    with pytest.raises(ModelError, match="no chat template"):
        loading.tokenizer_folder(str(folder), tmp_path / "unused")


def test_a_model_without_weights_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = copied(model_folder, tmp_path / "empty", without="model.safetensors")
    with pytest.raises(ModelError, match="cannot be loaded"):
        loading.load_causal_lm(str(folder), dtype="float32")


def test_weights_that_the_config_needs_and_the_files_lack_are_never_random(model_folder: Path, tmp_path: Path) -> None:
    folder = copied(model_folder, tmp_path / "deeper")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks 9 of its weights"):
        loading.load_causal_lm(str(folder), dtype="float32")


def test_truncated_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = copied(model_folder, tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        loading.load_causal_lm(str(folder), dtype="float32")


def test_an_unreachable_hugging_face_id_says_what_works_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="fetch-smollm2"):
        loading.load_causal_lm("tailrace-tests/no-such-model", dtype="float32")


def test_a_gguf_file_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ModelError, match=r"tailrace\[gguf\]"):
        loading.resolve_model(str(file))
