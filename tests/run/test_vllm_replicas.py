"""vLLM behind the router: replicas that are lost in the middle, and generators that run already."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import EngineFailed
from tailrace.generation.router.router import Router
from tailrace.generation.router.settings import RouterSettings
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.records import Completion, FinishReason, GenerationRequest, OnChunk, SamplingParams
from tailrace.reporting.summary import read_summary
from tailrace.run.orchestrator import RUN_ENDED
from tests.generation.engine_kinds import contract_model, require_vllm_installed
from tests.generation.engine_support import greedy_reference
from tests.run.runs import PATIENCE_S, command, records
from tests.run.served import address_of, require_refused, serving
from tests.support.bundled_models import save_smaller, save_with_other_weights

pytestmark = pytest.mark.xdist_group("vllm")

VLLM = ("--generator.engine", "vllm", "--generator.vllm.block_size", "32", "--generator.chunk_tokens", "4")
ADAPTERS = ("--trainer.lora.rank", "4", "--trainer.lora.publish", "adapters")
LENGTHS = [100 - 3 * number for number in range(24)]
"""So that at any moment some requests are in their middle."""


class Counting(GeneratorClient):
    """Knows how many tokens came with completions."""

    completed_tokens = 0

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        done = await super().generate(request, on_chunk)
        self.completed_tokens += done.num_tokens - request.prefix_tokens
        return done


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_vllm_installed()


async def test_a_vllm_replica_killed_in_the_middle_costs_no_request_and_no_token_that_was_streamed(
    tmp_path: Path,
) -> None:
    contract_model().save_pretrained(tmp_path)
    options = (*VLLM, "--generator.max_cache_tokens", "128", "--address", "tcp://127.0.0.1:0")
    router = Router(["first", "second"], RouterSettings(policy="least_loaded"), max_staleness=4)
    with serving(*options, model=str(tmp_path)) as first, serving(*options, model=str(tmp_path)) as second:
        addresses = [await asyncio.to_thread(address_of, process) for process in (first, second)]
        clients = [Counting(address) for address in addresses]
        uses = []
        for name, client in zip(("first", "second"), clients, strict=True):
            uses.append(asyncio.create_task(router.use(name, client, (await client.hello("run")).statistics)))

        async def ask_until_one_is_lost(number: int) -> list[Completion]:
            done: list[Completion] = []
            while not (done and uses[0].done()):
                completion = await router.generate(
                    GenerationRequest(
                        request_id=f"r{number}.{len(done)}",
                        session_id=f"s{number}",
                        group_id=f"g{number}",
                        prompt_token_ids=np.array([1, 2, number], np.int32),
                        sampling=SamplingParams(temperature=0, max_tokens=LENGTHS[number]),
                    )
                )
                done.append(completion)
            return done

        async with asyncio.timeout(PATIENCE_S):
            calls = [asyncio.create_task(ask_until_one_is_lost(number)) for number in range(len(LENGTHS))]
            while (await clients[0].hello("run")).statistics.sampled_tokens_total < 8 * 20:
                pass
            first.send_signal(signal.SIGKILL)
            done = await asyncio.gather(*calls)
            assert isinstance(await uses[0], EngineFailed)
        for number, completions in enumerate(done):
            expected = greedy_reference(contract_model(), [1, 2, number], LENGTHS[number])
            for completion in completions:
                assert completion.finish_reason is FinishReason.LENGTH
                assert completion.token_ids.tolist() == expected
        assert router.replicas[0].failovers > 0
        tokens = sum(completion.num_tokens for completions in done for completion in completions)
        kept = tokens - (await clients[1].hello("run")).statistics.sampled_tokens_total
        assert kept > clients[0].completed_tokens  # also of what it had begun
        for task, client in zip(uses, clients, strict=True):
            task.cancel()
            await client.leave()


@pytest.mark.parametrize("overrides", [(), ADAPTERS], ids=["whole weights", "adapters"])
def test_a_run_trains_with_vllm(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """In turns: what a step trains on was sampled with the weights, or the adapters, of the one before."""
    options = (*VLLM, *overrides, "--schedule", "sync", "--trainer.learning_rate", "5e-3")
    with command(tmp_path, *options, "--max_steps", "3") as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    summary = read_summary(run.folder)
    assert (summary.steps, summary.ledger.by_state["trained"]) == (3, 12)
    assert [line["training/logprob_difference_fresh"] < 1e-4 for line in records(run.folder / "metrics.jsonl")] == [
        True
    ] * 3


@pytest.mark.long
def test_a_run_with_two_vllm_replicas_accounts_for_every_rollout_although_one_is_killed(tmp_path: Path) -> None:
    options = (*VLLM, "--generator.replicas", "2", "--rollouts.max_tokens", "48")
    with command(tmp_path, *options, "--max_steps", "30") as run:
        run.wait_until(lambda: _newest(run.folder, "generator/generator-0/requests") > 0)
        victim = run.role("generator-0")
        victim.suspend()  # it keeps the requests that it gets from now on
        run.wait_for_steps(len(records(run.folder / "metrics.jsonl")) + 3)
        run.wait_until(lambda: _newest(run.folder, "generator/generator-0/requests") > 0)
        victim.kill()
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed
    assert "generator-0 is started again" in printed
    ledger = read_summary(run.folder).ledger
    assert ledger.balances
    assert ledger.by_state["failed"] == 0, printed
    assert set(ledger.by_reason["cancelled"]) <= {RUN_ENDED}
    assert set(ledger.by_reason["filtered"]) <= {"stale"}
    assert _newest(run.folder, "generator/generator-0/failovers") > 0


@pytest.mark.long
def test_runs_train_with_a_vllm_generator_that_runs_already_whose_weights_they_replace(tmp_path: Path) -> None:
    other, smaller = save_with_other_weights(tmp_path / "other"), save_smaller(tmp_path / "smaller")
    with serving(*VLLM, "--address", "tcp://127.0.0.1:0", model=other) as process:
        connect = ("--max_steps", "3", "--generator.connect", address_of(process))
        with command(tmp_path, "--model.name", smaller, *connect, name="refused") as run:
            require_refused(*run.wait(), served=other, own=smaller)
        for name in ("run", "next"):  # the next one replaces what the first one has trained
            with command(tmp_path, *connect, name=name) as run:
                status, printed = run.wait()
                assert (status, run.leftovers()) == (0, []), printed
            assert records(run.folder / "metrics.jsonl")[0]["training/logprob_difference_fresh"] < 1e-4
            assert _newest(run.folder, "generator/generator/policy_version") > 0
            assert read_summary(run.folder).ledger.by_state["trained"] == 12
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


def _newest(folder: Path, name: str) -> float:
    lines = reversed(records(folder / "metrics.jsonl"))
    return float(next((line[name] for line in lines if name in line), 0.0))
