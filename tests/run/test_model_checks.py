"""A dry run refuses a model of this machine as the run would, and looks at no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from tailrace.cli import main
from tailrace.errors import ModelError
from tailrace.models.loading import copy_tokenizer
from tailrace.run.model_checks import as_planned, require_known_files
from tests.run.runs import TINY, environment, run_inline, tiny_settings
from tests.support.bundled_models import BUNDLED, copy_bundled
from tests.support.expert_models import expert_model
from tests.support.quantized_models import say_quantized
from tests.support.state_models import save_state_model


def without_end(folder: Path) -> Path:
    """Its template closes replies with no token."""
    copy_bundled(folder)
    for name, key in (("tokenizer_config.json", "eos_token"), ("config.json", "eos_token_id")):
        told = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({one: value for one, value in told.items() if one != key}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


def without(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (copy_bundled(folder) / name).unlink()
        return folder

    return make


def cut(folder: Path) -> Path:
    [weights] = copy_bundled(folder).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def quantized(folder: Path) -> Path:
    return say_quantized(copy_bundled(folder), {"quant_method": "awq", "bits": 4})


def encoder_decoder(folder: Path) -> Path:
    config = T5Config(vocab_size=512, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    copy_tokenizer(BUNDLED, folder)
    return folder


def with_sinks(folder: Path) -> Path:
    config = GptOssConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1, pad_token_id=None,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(BUNDLED, folder)
    return folder


def broken_gguf(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 20)
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (save_state_model, "MambaForCausalLM cannot run on the torch engine: it has layers of type linear_attention"),
        (with_sinks, "GptOssForCausalLM cannot run on the torch engine: it has attention sinks"),
        (encoder_decoder, "(transformers has no causal language model of this architecture: choose another model)"),
        pytest.param(
            *(broken_gguf, "(its files are incomplete or broken)"),
            marks=pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf: make install-dev"),
        ),
        (without("tokenizer.json"), "holds no tokenizer"),
        (without("model.safetensors"), "holds no weights"),
        (without("chat_template.jinja"), "has no chat template"),
        (without_end, "names a token that ends a reply"),
        (cut, "is cut short"),
        (quantized, "is quantized (awq); name its bfloat16 weights"),
    ],
)
def test_what_a_run_would_refuse_is_refused(
    make: Callable[[Path], Path], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make(tmp_path / "model"))
    assert main(["train", "quickstart", *TINY, *environment("words"), "--dry-run", "--model.name", model]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("make", [save_state_model, with_sinks])
def test_a_run_looks_as_closely_at_what_may_have_more_than_keys_and_values(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = str(make(tmp_path / "model"))
    with pytest.raises(ModelError, match="cannot run on the torch engine"):
        require_known_files(tiny_settings("--model.name", model))


class Looked(Exception):
    """At a model, closely."""


def configs_with_sinks() -> list[PreTrainedConfig]:
    """Of every family in transformers whose attention has them, where it can be made without being told anything."""
    models = Path(transformers.__file__).parent / "models"
    families = {
        file.parent.name for file in models.glob("*/modeling_*.py") if "self.sinks" in file.read_text(encoding="utf-8")
    }
    configs = []
    for kind in CONFIG_MAPPING:
        if model_type_to_module_name(kind) in families:
            with suppress(Exception):
                configs.append(CONFIG_MAPPING[kind]())
    return configs


def test_a_run_looks_closely_at_every_kind_of_model_that_has_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(name: str) -> None:
        raise Looked

    monkeypatch.setattr("tailrace.run.model_checks.outline_of", look)
    folder = copy_bundled(tmp_path / "model")
    settings = tiny_settings("--model.name", str(folder))
    require_known_files(settings)
    passed, seen = [], []
    for config in configs_with_sinks():
        seen.append(config.model_type)
        (folder / "config.json").write_text(config.to_json_string(use_diff=False))
        with suppress(Looked):
            require_known_files(settings)
            passed.append(config.model_type)
    assert "gpt_oss" in seen
    assert not passed


def test_a_quantized_model_is_refused_where_vllm_would_keep_it_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = say_quantized(copy_bundled(tmp_path / "model"), {"quant_method": "fp8"})
    plan = ["train", "quickstart", *TINY, *environment("words"), "--dry-run", "--max_steps", "1"]
    assert main([*plan, "--model.name", str(model), "--generator.engine", "vllm"]) == 2
    assert "is quantized (fp8): vLLM keeps its weights packed" in capsys.readouterr().err
    assert main([*plan, "--model.name", str(model)]) == 0


BESIDE = (
    ("trainer.loss.distillation.model", ()),
    ("trainer.loss.reference_kl.model", ("--trainer.loss.reference_kl.coefficient", "0.1")),
)
"""Settings that name a model beside the policy, and others that they need."""


@pytest.mark.parametrize("policy", ["bundled:quickstart", "someone/some-model"])
@pytest.mark.parametrize(("setting", "others"), BESIDE)
def test_a_quantized_model_beside_the_policy_is_refused_where_it_would_have_to_be_unpacked(
    setting: str, others: tuple[str, ...], policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = str(quantized(tmp_path / "packed"))
    plan = ["train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", "--dry-run", *others]
    assert main([*plan, "--model.name", policy, f"--{setting}", packed]) == 2
    assert f"model {packed!r} is quantized (awq); name its bfloat16 weights" in capsys.readouterr().err


async def test_a_run_refuses_a_quantized_reference_before_its_folder_says_that_it_began(tmp_path: Path) -> None:
    packed = ("--trainer.loss.reference_kl.model", str(quantized(tmp_path / "packed")))
    with pytest.raises(ModelError, match=r"is quantized \(awq\); name its bfloat16 weights"):
        await run_inline(tmp_path / "runs", "--max_steps", "1", *packed)
    assert not (tmp_path / "runs" / "run").exists()


def test_a_teacher_that_vllm_serves_may_stay_packed(tmp_path: Path) -> None:
    teacher = ("--trainer.loss.distillation.model", str(quantized(tmp_path / "packed")))
    elsewhere = tiny_settings("--generator.engine", "vllm", "--model.name", "someone/some-model", *teacher)
    assert as_planned(elsewhere) is elsewhere


@pytest.fixture
def packed_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model whose files this machine has in the hub's cache alone."""
    files = tmp_path / "hub" / "models--tailrace-tests--packed"
    say_quantized(copy_bundled(files / "snapshots" / "first"), {"quant_method": "fp8"})
    (files / "refs").mkdir()
    (files / "refs" / "main").write_text("first")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "tailrace-tests/packed"


async def test_a_hub_s_quantized_model_is_refused_where_vllm_would_keep_it_packed(
    packed_on_a_hub: str, tmp_path: Path
) -> None:
    settings = ("--max_steps", "1", "--generator.engine", "vllm", "--model.name", packed_on_a_hub)
    with pytest.raises(ModelError, match=r"is quantized \(fp8\): vLLM keeps its weights packed"):
        await run_inline(tmp_path, *settings)
    with pytest.raises(ModelError, match=r"is quantized \(fp8\): vLLM keeps its weights packed"):
        as_planned(tiny_settings(*settings))


@pytest.mark.parametrize("name", ["tailrace-tests/unknown", "/nowhere/packed"])
def test_of_a_model_that_is_in_no_cache_a_plan_knows_nothing(packed_on_a_hub: str, name: str) -> None:
    elsewhere = tiny_settings("--generator.engine", "vllm", "--model.name", name)
    assert as_planned(elsewhere) is elsewhere


@pytest.mark.parametrize(
    ("setting", "others", "unknown"),
    [
        ("trainer.loss.distillation.model", (), "What the teacher needs of memory is not known here"),
        (
            "trainer.loss.reference_kl.model",
            ("--trainer.loss.reference_kl.coefficient", "0.1"),
            "The reference model is not known here, and is counted as large as the trained one",
        ),
    ],
)
def test_a_model_beside_the_policy_is_refused_where_it_is_here(
    setting: str, others: tuple[str, ...], unknown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = str(copy_bundled(tmp_path / "renamed", drop_token=True))
    plan = ("train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", "--dry-run", *others)
    assert main([*plan, f"--{setting}", renamed]) == 2
    assert f"{setting} is '{renamed}', which has another vocabulary" in capsys.readouterr().err
    assert main([*plan, f"--{setting}", "someone/some-model"]) == 0
    assert unknown in capsys.readouterr().out


def test_a_teacher_that_its_engine_cannot_serve_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_state_model(tmp_path / "mamba")
    copy_tokenizer(BUNDLED, model)
    teacher = ("--trainer.loss.distillation.model", str(model))
    assert main(["train", "quickstart", *TINY, *environment("words"), "--dry-run", *teacher]) == 2
    assert "MambaForCausalLM cannot run on the torch engine" in capsys.readouterr().err


def test_experts_of_a_model_without_any_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = ("--generator.return_routed_experts", "true", "--max_steps", "1")
    assert main(["train", "quickstart", *TINY, *environment("words"), "--dry-run", *dense]) == 2
    assert "has no routers" in capsys.readouterr().err
    expert_model("qwen3-moe").save_pretrained(tmp_path / "experts")
    copy_tokenizer(BUNDLED, tmp_path / "experts")
    routed = (*dense, "--model.name", str(tmp_path / "experts"))
    assert main(["train", "quickstart", *TINY, *environment("words"), "--dry-run", *routed]) == 0


def test_a_model_that_another_engine_may_serve_is_planned_without_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model.name", str(save_state_model(tmp_path / "mamba")), "--generator.connect", "tcp://127.0.0.1:1")
    assert main(["train", "quickstart", *TINY, *environment("words"), *model, "--max_steps", "1", "--dry-run"]) == 0
    assert "memory is not known here: MambaForCausalLM has no attention" in capsys.readouterr().out


def test_a_plan_goes_by_the_model_s_own_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=16, n_layer=1, n_head=2, n_positions=256)).save_pretrained(
        tmp_path
    )
    copy_tokenizer(BUNDLED, tmp_path)
    assert main(["train", "quickstart", "--dry-run", "--model.name", str(tmp_path)]) == 0
    assert "keys and values of 64 requests of 256 tokens" in capsys.readouterr().out


def test_what_is_not_here_is_not_looked_at() -> None:
    elsewhere = tiny_settings("--model.name", "someone/some-model")
    require_known_files(elsewhere)
    assert as_planned(elsewhere) is elsewhere
