"""Two ranks of the torch engine, driven alike over gloo: this process is rank 0, a child is rank 1."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tailrace.errors import EngineFailed, ModelError
from tailrace.generation.decisions import WeightPolicy
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.generation.engines.torch import TorchEngine
from tailrace.generation.lockstep.engine import LockstepEngine, follow
from tailrace.generation.lockstep.lifeline import Lifeline
from tailrace.generation.lockstep.ranks import RankGroup, join_ranks
from tailrace.records import Completion
from tests.generation.engine_support import (
    Driver,
    forward_logprobs,
    greedy_reference,
    make_engine,
    make_model,
    request,
)
from tests.support.expert_models import expert_model, plain_routing
from tests.training.rank_processes import CONTEXT

pytestmark = pytest.mark.xdist_group("trainer ranks")
"""One process of the test command has the server that forks ranks."""

FAILING_STEP = 6


class FailingEngine(TorchEngine):
    """Real until its sixth step."""

    def step(self) -> list[SampledTokens]:
        if self.statistics().steps_total == FAILING_STEP:
            raise ZeroDivisionError("the wheel came off")
        return super().step()


def join(store: dist.Store, rank: int, size: int = 2) -> tuple[RankGroup, Lifeline]:
    """What joins the engine of one rank to those of the others."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    lifeline = Lifeline(store, rank, size)
    return join_ranks(store, rank, size), lifeline


def store_of(folder: str) -> dist.Store:
    return dist.FileStore(f"{folder}/ranks", 2)


def other_rank(folder: str, fails: bool) -> None:
    torch.set_num_threads(1)
    joined = join(store_of(folder), 1)
    engine = FailingEngine(make_model(), slots=4) if fails else make_engine(make_model())
    try:
        follow(engine, *joined)
    except EngineFailed as error:
        Path(folder, "error").write_text(f"{error} / {error.__cause__!r}")
        raise SystemExit(3) from error


@contextmanager
def two_ranks(folder: Path, *, fails: bool = False) -> Iterator[tuple[BaseProcess, tuple[RankGroup, Lifeline]]]:
    process = CONTEXT.Process(target=other_rank, args=(str(folder), fails))
    process.start()
    try:
        yield process, join(store_of(str(folder)), 0)
    finally:
        process.join(30)


def ask(generator: Generator, name: str, prompt: list[int], **sampling: object) -> asyncio.Task[Completion]:
    return asyncio.create_task(generator.generate(request(name, prompt, **sampling)))


def lend(tensors: Mapping[str, torch.Tensor]):
    @contextmanager
    def open_tensors() -> Iterator[Mapping[str, torch.Tensor]]:
        yield tensors

    return open_tensors


async def test_two_ranks_generate_load_and_close_in_lockstep(model, tmp_path: Path) -> None:
    newer = make_model(seed=1)
    with two_ranks(tmp_path) as (process, joined):
        policy = WeightPolicy("hot_swap", "recompute", attempts=1)
        async with Generator(
            lambda: LockstepEngine(make_engine(model, kv_cache="recompute"), *joined), policy
        ) as generator:
            done = await asyncio.gather(
                *(ask(generator, str(i), [i + 1, 2], temperature=0, max_tokens=9) for i in range(6))
            )
            for i, completion in enumerate(done):
                assert completion.token_ids.tolist() == greedy_reference(model, [i + 1, 2], 9)
            cancelled = ask(generator, "cancelled", [5, 6], max_tokens=250)
            await asyncio.sleep(0.05)
            cancelled.cancel()
            with pytest.raises(ModelError, match="stranger"):  # on every rank, which all live on
                await generator.load_model_state_dict(lend({"stranger": torch.zeros(3)}), 1)
            assert await generator.load_model_state_dict(lend(newer.state_dict()), 2) == 2
            generator.reseed(7)
            fresh = await ask(generator, "sampled", [4, 5], max_tokens=20)  # seeds are drawn alike
            np.testing.assert_allclose(fresh.logprobs, forward_logprobs(newer, [4, 5], fresh.token_ids), atol=1e-4)
    assert process.exitcode == 0


async def test_a_rank_that_fails_ends_all_of_them_with_its_error(model, tmp_path: Path) -> None:
    with two_ranks(tmp_path, fails=True) as (process, joined):
        generator = Generator(lambda: LockstepEngine(make_engine(model), *joined))
        with pytest.raises(EngineFailed, match="rank 1 of the engine failed: ZeroDivisionError: the wheel came off"):
            await ask(generator, "r", [1, 2], max_tokens=50)
        await generator.close()
    assert process.exitcode == 3
    assert "ZeroDivisionError('the wheel came off')" in (tmp_path / "error").read_text()


async def test_a_rank_that_is_killed_ends_the_others_at_once(model, tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (process, joined):
        generator = Generator(lambda: LockstepEngine(make_engine(model), *joined))
        assert (await ask(generator, "before", [1, 2], max_tokens=3)).num_tokens == 3
        calls = [ask(generator, str(i), [1, 2], max_tokens=250) for i in range(3)]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, EngineFailed)
                assert "died or was ended" in str(result)
        await generator.close()


async def test_ranks_that_do_not_sample_the_same_are_found_out(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (process, joined):
        generator = Generator(lambda: LockstepEngine(make_engine(make_model(seed=5)), *joined))
        with pytest.raises(EngineFailed, match="did not sample the same tokens"):
            await ask(generator, "r", [1, 2], temperature=0, max_tokens=20)
        await generator.close()
    assert process.exitcode == 3


def test_rank_0_hands_out_what_its_engine_routed() -> None:
    model = expert_model("mixtral")
    driver = Driver(LockstepEngine(make_engine(model, return_routed_experts=True), *join(dist.HashStore(), 0, size=1)))
    [done] = driver.run(request("r", [1, 2, 3], max_tokens=5))
    handed_out = driver.chunks["r"][-1].routed_experts
    np.testing.assert_array_equal(handed_out, plain_routing(model, [1, 2, 3, *done.token_ids.tolist()])[:-1].numpy())
