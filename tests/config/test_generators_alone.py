"""Settings of generators alone are valid, whatever those of the run say of its other roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import RunSettings, list_recipes, load_settings, without_training

EXAMPLES = Path(__file__).parents[2] / "examples"
ELASTIC = ("--generator.replicas", "{min = 2, max = 4}")
CONNECTED = ("--generator.connect", "tcp://127.0.0.1:1,tcp://127.0.0.1:2")
HARD = {
    "ranks": ("--trainer.ranks", "2"),
    "GPUs of the trainer": ("--trainer.device", "cuda", "--trainer.ranks", "2", "--trainer.devices", "0,1"),
    "GPUs of a generator": ("--generator.device", "cuda", "--generator.devices", "1"),
    "GPUs of vLLM": ("--generator.engine", "vllm", "--generator.tensor_parallel", "2", "--generator.devices", "1,2"),
    "a trainer elsewhere": ("--placement", "redis", "--transport.redis.url", "redis://host:6379/0"),
    "batches in Redis": ("--transport.batches", "redis", "--transport.redis.start", "true"),
    "batches in memory": ("--placement", "inline", "--transport.batches", "memory"),
    "a cluster": ("--placement", "ray", "--ray.wait_s", "60", "--transport.weights", "object_store"),
    "a cluster that grows": ("--placement", "ray", "--generator.replicas", "{min = 1, max = 4, grow_after_s = 5}"),
    "weights between GPUs": ("--transport.weights", "nccl", "--trainer.device", "cuda", "--generator.engine", "vllm"),
    "weights over the network": (*CONNECTED, "--transport.weights", "whole"),
    "guests": (*ELASTIC, "--generator.join_address", "tcp://127.0.0.1:1"),
    "experts by value": (
        *(*CONNECTED, "--transport.payloads", "value"),
        *("--generator.return_routed_experts", "true", "--trainer.router_replay", "on"),
    ),
    "adapters": (
        *("--trainer.lora.rank", "4", "--trainer.lora.publish", "adapters"),
        *("--generator.engine", "vllm", "--generator.vllm.enable_lora", "true"),
    ),
    "supports that two ranks share": ("--rollouts.top_k", "8192", "--trainer.ranks", "2"),
    "a teacher": ("--trainer.loss.distillation.model", "big"),
    "agent workers": ("--rollouts.agent_workers", "2", "--gateway.port", "8000"),
    "rollouts before their group": ("--scheduling.group_release", "early"),
    "no staleness": ("--schedule", "sync", "--scheduling.max_staleness", "0"),
}


def require_valid(settings: RunSettings) -> RunSettings:
    """As every role reads them."""
    alone = without_training(settings)
    assert RunSettings.model_validate_json(alone.model_dump_json()) == alone
    return alone


@pytest.mark.parametrize("overrides", HARD.values(), ids=HARD)
def test_what_the_other_roles_ask_for_contradicts_nothing(overrides: tuple[str, ...]) -> None:
    require_valid(load_settings("quickstart", overrides))


@pytest.mark.parametrize("recipe", list_recipes())
def test_every_packaged_recipe_plays_alone(recipe: str) -> None:
    require_valid(load_settings(recipe))


@pytest.mark.parametrize("tokens", ["4096", "16384"])
def test_a_run_that_an_outside_trainer_ends_and_lays_rows_for_does_too(tokens: str) -> None:
    settings = load_settings(str(EXAMPLES / "external_trainer.toml"), ["--generator.max_cache_tokens", tokens])
    assert require_valid(settings).max_model_tokens == int(tokens)


@pytest.mark.parametrize(
    ("overrides", "placement", "names"),
    [
        ((), "inline", ["generator"]),
        (("--generator.replicas", "{min = 1, max = 4}"), "inline", ["generator"]),
        (ELASTIC, "local", ["generator-0", "generator-1"]),
        (CONNECTED, "local", ["generator-0", "generator-1"]),
        (HARD["GPUs of a generator"], "local", ["generator"]),
    ],
)
def test_the_generators_are_those_that_a_run_begins_with(
    overrides: tuple[str, ...], placement: str, names: list[str]
) -> None:
    alone = without_training(load_settings("quickstart", overrides))
    assert (alone.placement, [*alone.generator.replica_names]) == (placement, names)
    assert alone.max_running == len(names) * alone.generator.slots
