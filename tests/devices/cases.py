"""The trainer's step, weight loading and the torch engine's step on a device: run by `test_devices.py`."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.generation.engines.torch import TorchEngine
from tailrace.models.heads import OutputHead
from tailrace.records import GenerationRequest, GroupId, RequestId, SamplingParams, SessionId
from tailrace.training.losses import Divisor, load_loss
from tailrace.training.model.head import LogprobHead
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.step.loss_sums import LossSums
from tailrace.training.step.offloaded_moments import OffloadedAdamW
from tailrace.training.trainer import Trainer
from tests.devices.stand_in import stand_in_gpu
from tests.training.losses.support import BUILT_IN, settings_of
from tests.training.rows.test_shared_prefixes import batch_with_common_beginnings
from tests.training.tiny import CONFIGS, VOCABULARY, build_batch, demonstrating


def test_the_stand_in_refuses_mixed_devices() -> None:
    with stand_in_gpu(), pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_the_stand_in_counts_reads() -> None:
    with stand_in_gpu() as gpu:
        weight = torch.nn.Parameter(torch.ones(3, 3, device="cuda"))
        loss = (torch.ones(2, 3, device="cuda") @ weight).sum()
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.is_cuda
        assert gpu.reads == 0
        float(loss)
        loss.detach().cpu().numpy()
        assert gpu.reads == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_steps(dtype: str) -> None:
    with stand_in_gpu() as gpu:
        engine = TorchEngine(build("qwen3", dtype, device="cuda"), slots=4, max_model_tokens=64)
        for index in range(3):
            engine.add(request(index))
        steps = 0
        while engine.has_work and steps < 40:
            before = gpu.reads
            engine.step()
            assert gpu.reads - before <= 1
            steps += 1
    assert not engine.has_work


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["all weights", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_weights_go_from_trainer_to_engine(
    dtype: str, lora: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_models_by_name(monkeypatch)
    with stand_in_gpu():
        settings = TrainerSettings.model_validate({"device": "cuda", "dtype": dtype, "lora": lora})
        trainer = Trainer(settings, model_name="qwen3", max_steps=10, max_staleness=4)
        published = trainer.snapshot(dtype).wait()
        assert all(not tensor.is_cuda for tensor in published.values())
        engine = TorchEngine(build("qwen3", dtype, device="cuda"), slots=4, max_model_tokens=64)
        engine.load_model_state_dict(engine.prepare(published), 1)
        engine.add(request(0))
        engine.step()
        assert engine.statistics().policy_version == 1


def test_activations_leave_the_device_without_a_wait() -> None:
    loss, row = load_loss(settings_of("clipped_ratio")), build_batch(lengths=(300, 500), rows=(2,)).row(0)
    with stand_in_gpu() as gpu:
        model = build("qwen3", "float32", device="cuda")
        policy = PolicyModel(model, dtype="bfloat16", gradient_checkpointing=True, offload_activations=True)
        micro_batch = MicroBatch.of(row, 0, "cuda", padded=policy.pads_segments)
        before = gpu.reads
        policy(micro_batch, loss).total.backward()
        assert gpu.reads == before
        assert all(weight.grad is not None and weight.grad.is_cuda for weight in policy.parameters())


def test_moments_cross_to_the_device_and_back_without_a_read() -> None:
    with stand_in_gpu() as gpu:
        weights = [torch.nn.Parameter(torch.ones(size, 3, device="cuda")) for size in (50, 2)]
        optimizer = OffloadedAdamW([{"params": weights}], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, block_numbers=64)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert gpu.reads == 0
        for weight in weights:
            state = optimizer.state[weight]
            assert (state["exp_avg"].shape, state["exp_avg"].is_cuda) == (weight.shape, False)
            assert (state["exp_avg_sq"].is_cuda, state["step"].is_cuda) == (False, True)


@pytest.mark.parametrize(("dtype", "pads"), [("float32", True), ("bfloat16", False)], ids=["float32", "bfloat16"])
def test_a_row_is_padded_only_where_no_kernel_takes_it_as_it_is(dtype: str, pads: bool) -> None:
    with stand_in_gpu():
        policy = PolicyModel(build("qwen3", "float32", device="cuda"), dtype=dtype)
        assert policy.packs
        assert policy.pads_segments == pads


STEPS = [  # `head_dtype` is read under bfloat16 alone
    ("qwen3", "float32", "float32", True),
    ("qwen3", "bfloat16", "bfloat16", False),
    ("qwen3", "bfloat16", "float32", True),
    ("gpt2", "bfloat16", "float32", False),
    ("mistral with a sliding window", "float32", "float32", False),
    ("mistral with a sliding window", "bfloat16", "float32", False),
    ("gemma2 with soft caps", "bfloat16", "float32", False),
]


@pytest.mark.parametrize(("model", "dtype", "head_dtype", "gradient_checkpointing"), STEPS)
def test_the_trainer_steps(
    model: str, dtype: str, head_dtype: str, gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_models_by_name(monkeypatch)
    settings = TrainerSettings(
        device="cuda", dtype=dtype, head_dtype=head_dtype, gradient_checkpointing=gradient_checkpointing
    )
    with stand_in_gpu() as gpu:
        trainer = Trainer(settings, model_name=model, max_steps=10, max_staleness=4)
        before = gpu.reads
        first = trainer.train_step(build_batch(lengths=(9, 14), rows=(2,), step=1))
        reads_of_one_row = gpu.reads - before
        trainer.train_step(build_batch(lengths=(9, 14, 5), rows=(2, 1), step=2, version=1))
        reads_of_two_rows = gpu.reads - before - reads_of_one_row
        published = trainer.snapshot("bfloat16").wait()
    assert first.version == 1
    assert all(not tensor.is_cuda for tensor in published.values())
    assert reads_of_one_row == reads_of_two_rows, "a micro-batch waits for the device"


@pytest.mark.parametrize(
    "loss", [{"name": "clipped_ratio"}, {"name": "gspo"}, {"name": "cispo", "masks": [{"name": "icepop"}]}], ids=str
)
def test_components_keep_to_the_device_and_never_wait_for_it(
    loss: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_models_by_name(monkeypatch)
    components = {"reference_kl": {"coefficient": 0.1}, "cross_entropy": {"coefficient": 0.1}}
    settings = TrainerSettings.model_validate({"device": "cuda", "loss": {**loss, **components}})
    with stand_in_gpu() as gpu:
        trainer = Trainer(settings, model_name="qwen3", max_steps=10, max_staleness=4)
        before = gpu.reads
        trainer.train_step(demonstrating(build_batch(lengths=(9, 14), rows=(2,), step=1), (1,)))
        reads_of_one_row = gpu.reads - before
        batch = build_batch(lengths=(9, 14, 5, 7), rows=(2, 1, 1), step=2, version=1)
        result = trainer.train_step(demonstrating(batch, (1, 2)))
        reads_of_three_rows = gpu.reads - before - reads_of_one_row
    assert result.version == 2
    assert reads_of_one_row == reads_of_three_rows, "a micro-batch waits for the device"


def test_by_itself_the_trainer_computes_in_16_bits_and_shared_prompts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take_models_by_name(monkeypatch)
    settings, loss = TrainerSettings(device="cuda"), load_loss(settings_of("clipped_ratio"))
    assert (settings.chosen_dtype, settings.chosen_head_dtype) == ("bfloat16", "bfloat16")
    batches = [
        batch_with_common_beginnings((40, 22, 38, 25), common=14),
        build_batch(lengths=(40, 22, 38, 25), rows=(4,), step=2, version=1),
    ]
    with stand_in_gpu() as gpu:
        policy = PolicyModel(build("qwen3", "float32", device="cuda"), dtype="bfloat16", head_dtype="bfloat16")
        shared, plain = (MicroBatch.of(batch.row(0), 0, "cuda", padded=policy.pads_segments) for batch in batches)
        assert shared.input_ids.shape[1] <= 125 - 14 - 14 - 7
        assert plain.input_ids.shape[1] == 125
        before = gpu.reads
        policy(shared, loss).total.backward()
        assert gpu.reads == before
        trainer = Trainer(settings, model_name="qwen3", max_steps=10, max_staleness=4)
        assert [trainer.train_step(batch).version for batch in batches] == [1, 2]


MASKS = [
    {"name": "icepop"},
    {"name": "sequence_ratio"},
    {"name": "geometric_ratio"},
    {"name": "off_policy_sequence", "threshold": 0.1},
]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("added", [{}, {"masks": MASKS[:1]}, {"masks": MASKS, "entropy": 0.1}], ids=str)
def test_no_loss_waits_for_the_device(name: str, added: dict[str, object]) -> None:
    settings = settings_of(name, **added)
    with stand_in_gpu() as gpu:
        head = LogprobHead(OutputHead(torch.nn.Linear(8, VOCABULARY, device="cuda")), torch.float32, chunk_bytes=1024)
        micro_batch = MicroBatch.of(build_batch(rows=(4,)).row(0), 0, "cuda")
        hidden = torch.ones(len(micro_batch.predictors), 8, device="cuda", requires_grad=True)
        sums = LossSums(loss := load_loss(settings), Divisor.of_loss(settings))
        before = gpu.reads
        output = head(hidden, micro_batch.tokens, loss)
        output.total.backward()
        sums.add(output, micro_batch)
        assert gpu.reads == before
        assert hidden.grad is not None


def take_models_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("trainer", "model.reference"):
        monkeypatch.setattr(f"tailrace.training.{module}.load_causal_lm", load)
    monkeypatch.setattr("tailrace.training.trainer.read_tokenizer", lambda name: {})


def load(name: str, *, dtype: str, device: str) -> PreTrainedModel:
    return build(name, dtype, device=device)


def build(name: str, dtype: str, *, device: str) -> PreTrainedModel:
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = 1  # every operation costs the stand-in the same: all layers of a model are alike
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def request(index: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"r{index}"),
        session_id=SessionId(f"s{index}"),
        group_id=GroupId("g"),
        prompt_token_ids=np.arange(1, 6 + index, dtype=np.int32),
        sampling=SamplingParams(max_tokens=3),
    )
