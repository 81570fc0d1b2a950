"""Whole runs that train on what top-p and top-k left of the vocabulary, and generators that do not sample as asked."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from tailrace.errors import SettingsError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import EngineLimits
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.models.identity import identify
from tailrace.run.evaluating import evaluate_model
from tailrace.run.replica_sources import ConnectedGenerator
from tailrace.run.training import train
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.run.runs import WITHOUT_MODEL, environment, records, run_inline, tiny_settings

STEPS = (
    "--max_steps",
    "4",
    "--rollouts.max_turns",
    "3",
    "--rollouts.max_tokens",
    "24",
    "--trainer.learning_rate",
    "1e-3",
)
FRESH = "training/logprob_difference_fresh"
HOT_JUDGE = r"environments\.0\.judge\.temperature asks for a temperature of 3, and the generator at tcp:.* at 2 at most"


@pytest.mark.parametrize("schedule", ["sync", "stream"])
async def test_a_run_with_a_nucleus_agrees_with_its_generator_as_one_without(tmp_path: Path, schedule: str) -> None:
    differences = {}
    for name, sampling in (("whole", ()), ("nucleus", ("--rollouts.top_p", "0.9", "--rollouts.temperature", "1.3"))):
        options = (*environment("conversing"), *STEPS, "--schedule", schedule, "--trainer.export_tokens", "jsonl")
        summary = await run_inline(tmp_path, *options, *sampling, name=name)
        assert (summary.exit_code, summary.steps) == (0, 4)
        lines = records(tmp_path / name / "metrics.jsonl")
        differences[name] = [line[FRESH] for line in lines if FRESH in line]
        tokens = [one for path in (tmp_path / name / "tokens").iterdir() for one in records(path)]
        sizes = [one["support_size"] for one in tokens]
        assert (max(sizes) == 0) == (name == "whole")
        assert (min(sizes) == 0) == (name == "whole")
    assert max(differences["whole"]) < 1e-5
    assert max(differences["nucleus"]) < 1e-5


class Narrow(SimulatedEngine):
    """With vLLM's range of temperatures, which it says once it is connected."""

    @property
    @override
    def limits(self) -> EngineLimits:
        return msgspec.structs.replace(super().limits, highest_temperature=2.0)


class Recording(SimulatedEngine):
    """Which says that it returns experts."""

    @property
    @override
    def limits(self) -> EngineLimits:
        return msgspec.structs.replace(super().limits, returns_experts=True)


async def refusal(engine: type[SimulatedEngine], *overrides: str, for_training: bool = True) -> str:
    """Why a run does not use a generator that runs already; empty where it does."""
    settings = tiny_settings(*overrides)
    async with served(engine, settings.model.name) as address:
        source = ConnectedGenerator("generator", address, settings, epoch="run", lend=None, for_training=for_training)
        client = await source.open(lambda statistics, received: None)
        try:
            await source.hello(client, seed=0)
        except SettingsError as error:
            return str(error)
        finally:
            await client.leave()
    return ""


@contextlib.asynccontextmanager
async def served(engine: type[SimulatedEngine], model: str) -> AsyncIterator[str]:
    """The address of a generator that runs already, until the block ends."""
    generator = Generator(lambda: engine(vocab_size=1024))
    opens = MemoryModelStateDictStore().open
    server = GeneratorServer(generator, opens, "tcp://127.0.0.1:*", model=identify(model))
    serving = asyncio.create_task(server.serve())
    try:
        yield server.address
    finally:
        client = GeneratorClient(server.address)
        await client.hello()
        await client.close()
        await asyncio.wait_for(serving, 10)


async def test_a_generator_that_cannot_tell_is_refused_before_the_first_rollout() -> None:
    nucleus = ("--rollouts.top_p", "0.9")
    assert await refusal(SimulatedEngine) == ""
    assert await refusal(SimulatedEngine, *nucleus, for_training=False) == ""
    found = await refusal(SimulatedEngine, *nucleus)
    assert "rollouts.top_p and rollouts.top_k" in found
    assert "does not return which tokens they kept" in found


async def test_a_generator_whose_slots_hold_less_than_a_request_may_have_is_refused() -> None:
    short, long = (
        ("--generator.max_cache_tokens", count, "--scheduling.row_tokens", count) for count in ("4096", "16384")
    )
    assert await refusal(SimulatedEngine, *short) == ""
    found = await refusal(SimulatedEngine, *long)
    assert "holds 4096 tokens, and requests of this run have up to 16384: start it with `tailrace serve" in found
    assert "--generator.max_cache_tokens 16384" in found


async def test_a_generator_that_returns_no_experts_is_refused_where_they_are_trained_with() -> None:
    experts = ("--generator.return_routed_experts", "true")
    assert await refusal(Recording, *experts) == await refusal(SimulatedEngine, *experts, for_training=False) == ""
    found = await refusal(SimulatedEngine, *experts)
    assert found.startswith("generator.return_routed_experts: the generator at tcp://127.0.0.1:")
    assert found.endswith("--generator.return_routed_experts true`")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("rollouts.temperature", ("--rollouts.temperature", "2.5")),
        ("rollouts.evaluation.temperature", ("--rollouts.evaluation.temperature", "2.25")),
        ("environments", ("--environment.temperature", "3")),
        ("environments.0.judge.temperature", ("--environment.judge.temperature", "3")),
    ],
)
async def test_a_generator_that_takes_no_such_temperature_is_refused_before_the_first_rollout(
    key: str, overrides: tuple[str, ...]
) -> None:
    found = await refusal(Narrow, *overrides)
    assert found.startswith(f"{key} asks for a temperature of {overrides[1]}, and the generator at tcp://127.0.0.1:")
    assert found.endswith("samples at 2 at most: write less, or serve with another engine")
    assert await refusal(SimulatedEngine, *overrides) == ""
    assert await refusal(Narrow, "--rollouts.evaluation.temperature", "0") == ""


async def test_so_is_one_that_a_judge_of_an_environments_own_would_ask(tmp_path: Path) -> None:
    judged = (*environment("judged_hotly"), *WITHOUT_MODEL, "--max_steps", "1")
    async with served(Narrow, tiny_settings().model.name) as address:
        settings = tiny_settings(*judged, "--generator.connect", address)
        with pytest.raises(SettingsError, match=HOT_JUDGE):
            await evaluate_model(settings)
        summary = await train(settings, tmp_path)
        assert (summary.exit_code, summary.steps) == (2, 0)
        assert re.search(HOT_JUDGE, summary.reason)
