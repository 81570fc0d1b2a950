"""vLLM over weights that it keeps, with adapters that come and go: a token is of the one that it is stamped with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tailrace.errors import ModelError
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.training.model.adapter import Adapter, add_adapter, plain_weights
from tailrace.training.settings.lora import LoraSettings
from tests.generation.engine_kinds import ROUNDING, contract_model, start_vllm
from tests.generation.engine_support import Driver, forward_logprobs, request
from tests.training.tiny import stir

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient

pytestmark = pytest.mark.xdist_group("vllm")

RANK = 4
PROMPTS = [[5, 9, 2, 7], [11]]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InprocClient]:
    started = start_vllm(tmp_path_factory.mktemp("model"), asynchronous=False, enable_lora=True, max_lora_rank=7)
    yield started
    started.shutdown()


def adapted(seed: int, **settings: object) -> tuple[Adapter, PreTrainedModel]:
    """An adapter of the contract's model, and that model with it added up."""
    model = copy.deepcopy(contract_model())
    torch.manual_seed(seed)
    adapter = add_adapter(model, LoraSettings.model_validate({"rank": RANK, "alpha": 6} | settings), "tiny")
    assert adapter is not None
    stir(model, scale=0.3)
    merged = copy.deepcopy(contract_model())
    merged.load_state_dict({name: weight.whole() for name, weight in plain_weights(model)}, strict=False)
    return adapter, merged


def published(adapter: Adapter) -> dict[str, torch.Tensor]:
    return dict(adapter.published(torch.float32))


def sample(driver: Driver, name: str) -> list[tuple[list[int], np.ndarray, np.ndarray, list[int]]]:
    requests = [request(f"{name}{index}", prompt, max_tokens=20) for index, prompt in enumerate(PROMPTS)]
    done = driver.run(*requests)
    return [
        (prompt, one.token_ids, one.logprobs, one.policy_versions.tolist())
        for prompt, one in zip(PROMPTS, done, strict=True)
    ]


def test_log_probabilities_are_those_of_the_weights_with_the_adapter_added_up(core: InprocClient) -> None:
    from tailrace.generation.engines.vllm.engine import VllmEngine

    driver = Driver(VllmEngine(core))
    for prompt, token_ids, logprobs, versions in sample(driver, "base"):
        expected = forward_logprobs(contract_model(), prompt, token_ids)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=ROUNDING)
        assert set(versions) == {0}
    for version, settings in enumerate([{}, {}, {"targets": ("q_proj", "down_proj")}], 1):
        adapter, merged = adapted(version, **settings)
        driver.engine.load_model_state_dict(published(adapter), version)
        for prompt, token_ids, logprobs, versions in sample(driver, f"of version {version}, "):
            expected = forward_logprobs(merged, prompt, token_ids)
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2 * ROUNDING)
            assert np.abs(forward_logprobs(contract_model(), prompt, token_ids) - expected).max() > 0.1
            assert set(versions) == {version}


def test_a_request_that_runs_goes_on_with_the_next_adapter(core: InprocClient) -> None:
    """Its first token after the change over keys and values of before, as with whole weights."""
    from tailrace.generation.engines.vllm.engine import VllmEngine

    engine = VllmEngine(core, kv_cache="recompute")
    driver = Driver(engine)
    driver.engine.add(request("runs on", PROMPTS[0], max_tokens=24))
    for _ in range(8):
        driver.step()
    adapter, merged = adapted(9)
    engine.load_model_state_dict(published(adapter), 8)
    engine.reset_prefix_cache(preempt_running=True)
    driver.finish()
    done = driver.done["runs on"]
    boundary = done.policy_versions.tolist().index(8)
    assert 0 < boundary < 24
    expected = forward_logprobs(merged, PROMPTS[0], done.token_ids)
    np.testing.assert_allclose(done.logprobs[boundary:], expected[boundary:], rtol=0, atol=2 * ROUNDING)


@pytest.mark.long
def test_processes_that_hold_half_a_model_each_add_up_their_parts_of_adapters(tmp_path: Path) -> None:
    from tailrace.generation.engines.vllm.core import build_core
    from tailrace.generation.engines.vllm.engine import VllmEngine

    contract_model().save_pretrained(tmp_path)
    options = {"block_size": 32, "enable_lora": True, "max_lora_rank": RANK}
    settings = GeneratorSettings(engine="vllm", slots=4, tensor_parallel=2, vllm=options)
    driver = Driver(VllmEngine(build_core(ModelSettings(name=str(tmp_path), max_model_tokens=128), settings)))
    try:
        for version in (1, 2):
            adapter, merged = adapted(version)
            driver.engine.load_model_state_dict(published(adapter), version)
            for prompt, token_ids, logprobs, versions in sample(driver, f"of version {version}, "):
                expected = forward_logprobs(merged, prompt, token_ids)
                np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2 * ROUNDING)
                assert set(versions) == {version}
    finally:
        driver.engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("whole weights", "takes adapters alone"),
        ("a layer that is not there", r"has no weight model.layers.7"),
        ("a wrong shape", r"lora_A.weight is \[4, 5\]"),
        ("too high a rank", "of rank 9 was published, and the engine takes 8"),
    ],
)
def test_what_cannot_be_an_adapter_of_this_model_is_refused_and_nothing_changes(
    core: InprocClient, change: str, message: str
) -> None:
    from tailrace.generation.engines.vllm.engine import VllmEngine

    adapter, merged = adapted(3)
    engine = VllmEngine(core)
    engine.load_model_state_dict(published(adapter), 3)
    wrong = published(adapted(4)[0])
    first = min(wrong)
    match change:
        case "whole weights":
            wrong = dict(contract_model().state_dict())
        case "a layer that is not there":
            wrong[first.replace("layers.0", "layers.7")] = wrong.pop(first)
        case "a wrong shape":
            wrong[first] = wrong[first][:, :5]
        case _:
            wrong = published(adapted(4, rank=9)[0])
    with pytest.raises(ModelError, match=message):
        engine.load_model_state_dict(wrong, 4)
    for prompt, token_ids, logprobs, versions in sample(Driver(engine), change):
        np.testing.assert_allclose(logprobs, forward_logprobs(merged, prompt, token_ids), rtol=0, atol=2 * ROUNDING)
        assert set(versions) == {3}
