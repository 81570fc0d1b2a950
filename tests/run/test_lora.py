"""Runs that train an adapter in place of all weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.errors import SettingsError
from tailrace.models.loading import copy_tokenizer
from tailrace.records import RunStatus
from tailrace.run.checkpoint_checks import require_own_checkpoint
from tailrace.run.evaluating import evaluate_model
from tailrace.training.trainer import Trainer
from tests.run.runs import RESUMED, TINY, environment, run_inline, tiny_settings
from tests.support.bundled_models import BUNDLED
from tests.support.expert_models import expert_model

LORA = ("--trainer.lora.rank", "4")


async def test_a_run_leaves_a_model_that_is_measured_and_goes_on_with_its_own_adapter_alone(tmp_path: Path) -> None:
    summary = await run_inline(tmp_path, *LORA, "--max_steps", "2")
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 2)
    checkpoint = Path(summary.checkpoint_path)
    assert (checkpoint / "adapter" / "adapter_model.safetensors").is_file()
    [found] = await evaluate_model(tiny_settings("--model.name", str(checkpoint)), limit=4)
    assert len(found.result.rewards) == 4
    with pytest.raises(SettingsError, match=r"trainer\.lora\.rank = 8 in place of 4"):
        await run_inline(tmp_path, "--trainer.lora.rank", "8", "--max_steps", "3", "--resume")
    with pytest.raises(SettingsError, match=r"is of another adapter than this run's: its rank \(4\) would be 8"):
        await run_inline(tmp_path, "--trainer.lora.rank", "8", "--max_steps", "3", *RESUMED)
    summary = await run_inline(tmp_path, *LORA, "--max_steps", "3", *RESUMED)
    assert (summary.status, summary.steps) == (RunStatus.FINISHED, 3)


def test_an_orchestrator_without_peft_guesses_no_layers_of_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft has a say in which they are: of this model it leaves dense layers out."""
    model = tmp_path / "model"
    expert_model("qwen3-moe, not normalised, a dense layer").save_pretrained(model)
    copy_tokenizer(BUNDLED, model)
    settings = tiny_settings("--model.name", str(model), *LORA)
    trainer = Trainer(settings.trainer, model_name=str(model), max_steps=2, max_staleness=1)
    trainer.save_checkpoint(tmp_path / "checkpoints")
    require_own_checkpoint(settings, tmp_path / "checkpoints")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "peft" else find(name, *of))
    require_own_checkpoint(settings, tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("--trainer.lora.targets", "q_porj,v_proj"),
            "'q_porj' matches no linear layer of LlamaForCausalLM; there",
        ),
        (("--trainer.lora.rank", "4096"), "trainer.lora.rank = 4096 is larger than model.layers.0."),
    ],
)
async def test_an_adapter_that_the_model_cannot_have_ends_the_run_before_its_first_step(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    summary = await run_inline(tmp_path, *LORA, *overrides, "--max_steps", "1")
    assert (summary.status, summary.exit_code, summary.steps) == (RunStatus.FAILED, 2, 0)
    assert message in summary.reason
    assert not [*tmp_path.rglob("step_*")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--trainer.lora.alpha", "8"), "lora.alpha is of adapters, and without lora.rank there are none"),
        ((*LORA, "--trainer.optimizer", "muon"), "makes steps of whole matrices orthogonal"),
        ((*LORA, "--trainer.lora.publish", "adapters"), "needs an engine that adds them up"),
        (
            (*LORA, "--generator.engine", "vllm", "--generator.vllm.enable_lora"),
            "enable_lora is for weights that come",
        ),
    ],
)
def test_settings_of_adapters_that_contradict_others_are_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", *overrides]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
