"""What a dry run says of memory: the arithmetic of a model's configuration, in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.errors import ModelError
from tailrace.run.memory import describe_memory, gigabytes
from tests.run.runs import TINY, environment, tiny_settings

WEIGHTS = 721_792
"""Of the bundled model."""
PINNED_WEIGHTS = 918_400
"""Each of its tensors rounded up to a power of two."""


def described(*overrides: str) -> str:
    return "\n".join(describe_memory(tiny_settings(*overrides)))


def figure(text: str, of: str) -> str:
    found = re.search(rf"([\d.,]+ [GM]B)  {re.escape(of)}", text)
    assert found is not None, text
    return found[1]


def test_a_dry_run_tells_each_term_and_loads_no_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert main(["train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"for {WEIGHTS:,} weights:" in printed
    assert figure(printed, "weights, in float32") == figure(printed, "gradients") == gigabytes(4 * WEIGHTS)
    assert figure(printed, "the optimizer's moments") == gigabytes(8 * WEIGHTS)
    assert f"{gigabytes(12 * WEIGHTS)} while a checkpoint is written" in printed
    assert len(re.findall(r"Rows of (256|512|1,024) tokens keep", printed)) == 3
    assert "The generator needs up to about" in printed
    assert "adapter" not in printed.partition("needs about")[2]


def test_an_adapter_and_ranks_are_told_apart() -> None:
    text = described("--trainer.lora.rank", "4", "--trainer.ranks", "2", "--model.dtype", "bfloat16")
    assert "Each of the trainer's 2 ranks needs about" in text
    assert figure(text, "weights, in float32") == gigabytes(2 * WEIGHTS)
    assert figure(text, "the adapter, its gradients and its moments")
    assert figure(text, "weights and gradients gathered from other ranks")
    assert "the optimizer's moments" not in text


def test_offloaded_moments_are_told_as_the_host_s() -> None:
    text = described("--trainer.device", "cuda", "--trainer.offload_optimizer", "true")
    assert f", {gigabytes(8 * PINNED_WEIGHTS)} for the optimizer's moments" in text
    assert "for the optimizer's moments" not in described("--trainer.device", "cuda")


def test_a_reference_is_a_second_model_but_where_it_lies_under_an_adapter() -> None:
    beside = ("--trainer.loss.reference_kl.coefficient", "0.1")
    assert figure(described(*beside), "the reference model") == gigabytes(4 * WEIGHTS)
    assert "the reference model" not in described(*beside, "--trainer.lora.rank", "4")


def test_a_teacher_is_a_process_with_memory_of_its_own() -> None:
    taught = ("--trainer.loss.distillation.model", "bundled:quickstart")
    assert "The teacher, a process of its own, needs up to about" in described(*taught)
    assert f": {WEIGHTS:,} weights {gigabytes(4 * WEIGHTS)}, keys and values of" in described(*taught)
    assert "teacher" not in described(*taught, "--trainer.loss.distillation.url", "http://there/v1")
    missing = described("--trainer.loss.distillation.model", "no/such/folder")
    assert "What the teacher needs of memory is not known here: " in missing


def test_weights_that_are_transferred_lie_on_the_gpu_twice() -> None:
    on_gpu = ("--trainer.device", "cuda", "--generator.engine", "vllm")
    text = described(*on_gpu, "--transport.weights", "nccl")
    assert f"On its GPU it needs up to {gigabytes(8 * WEIGHTS)} more" in text
    assert f"and {gigabytes(4 * WEIGHTS)} for each older version that is still being sent" in text
    assert "0.0 MB for weights on their way" in text
    assert f"{gigabytes(4 * PINNED_WEIGHTS)} for weights on their way" in described(*on_gpu)


def test_generators_that_run_already_are_not_this_machine_s(tmp_path: Path) -> None:
    assert "generator" not in described("--generator.connect", "tcp://127.0.0.1:5757").partition("On the host")[0]
    assert "needs up to about" not in described("--generator.connect", "tcp://127.0.0.1:5757")
    assert "Each of 2 generators needs" in described("--generator.replicas", "2")


def test_a_model_that_is_not_here_is_told_and_costs_nothing_else() -> None:
    assert described("--model.name", "nobody/no-such-model").startswith("What it needs of memory is not known here: ")


def test_a_bundled_model_that_there_is_not_is_an_error_anywhere() -> None:
    with pytest.raises(ModelError, match="bundled are: quickstart"):
        described("--model.name", "bundled:no-such-model")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--trainer.loss.name", "math:nope"), "math has no 'nope'"),
        (("--observability.trackers", "nope"), "nope"),
    ],
)
def test_what_only_a_role_would_import_is_looked_for_by_a_dry_run(
    wrong: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", "--dry-run", *wrong]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_an_adapter_that_the_model_cannot_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--trainer.lora.rank", "4", "--trainer.lora.targets", "q_porj")
    assert main(["train", "quickstart", *TINY, *environment("words"), "--max_steps", "1", "--dry-run", *wrong]) == 2
    assert "matches no linear layer of LlamaForCausalLM; there are q_proj" in " ".join(capsys.readouterr().err.split())
