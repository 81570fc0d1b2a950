"""Whole runs that train on what top-p and top-k left of the vocabulary."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.errors import SettingsError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.generation.settings import GeneratorSettings
from tailrace.models.identity import identify
from tailrace.run.replica_sources import ConnectedGenerator
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.run.runs import environment, records, run_inline

MODEL = "bundled:quickstart"
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


async def test_a_generator_that_cannot_tell_is_refused_before_the_first_rollout() -> None:
    generator = Generator(lambda: SimulatedEngine(vocab_size=1024))
    model = identify(MODEL)
    server = GeneratorServer(generator, MemoryModelStateDictStore().open, "tcp://127.0.0.1:*", model=model)
    serving = asyncio.create_task(server.serve())
    refusals = []
    for needs_supports in (True, False):
        source = ConnectedGenerator(
            *("generator", server.address, GeneratorSettings()),
            epoch="run",
            model=MODEL,
            lend=None,
            needs_supports=needs_supports,
        )
        client = await source.open(lambda statistics, received: None)
        try:
            await source.hello(client)
        except SettingsError as error:
            refusals.append(str(error))
        finally:
            await client.leave() if needs_supports else await client.close()
    await asyncio.wait_for(serving, 10)
    (refusal,) = refusals
    assert "rollouts.top_p and rollouts.top_k" in refusal
    assert "does not return which tokens they kept" in refusal
