"""A generator of two ranks in lockstep: of a run, and of `tailrace serve`, under torchrun and by itself."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import EngineFailed, SettingsError
from tailrace.generation.rpc.client import GeneratorClient
from tailrace.generation.settings import GeneratorSettings
from tailrace.records import Completion, GenerationRequest, SamplingParams
from tailrace.reporting.summary import read_summary
from tailrace.run.ranks import Rank, torchrun_rank
from tailrace.transport.weights.lending import ModelStateDictLender
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore
from tests.generation.engine_kinds import contract_model, require_vllm_installed
from tests.generation.engine_support import greedy_reference
from tests.run.runs import PATIENCE_S, command
from tests.run.served import ALONE, TORCHRUN, address_of, rank_of, refusal, serving

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")

TWO_RANKS = ("--generator.lockstep", "true", "--generator.tensor_parallel", "2")
VLLM = ("--generator.engine", "vllm", "--generator.vllm.block_size", "32", "--generator.max_cache_tokens", "128")

AT_TORCHRUNS = {
    **{"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
}


def test_a_process_of_torchrun_knows_its_rank_and_needs_the_settings_that_go_with_it() -> None:
    lockstep = GeneratorSettings(lockstep=True, tensor_parallel=2)
    assert torchrun_rank(lockstep, {}) is None
    assert torchrun_rank(lockstep, AT_TORCHRUNS) == Rank(number=1, size=2, host="localhost", port=29500, local=1)
    with pytest.raises(SettingsError, match=r"started 2 processes.* set generator.lockstep = true"):
        torchrun_rank(GeneratorSettings(), AT_TORCHRUNS)
    with pytest.raises(SettingsError, match=r"generator.tensor_parallel is 3, and torchrun started 2"):
        torchrun_rank(GeneratorSettings(lockstep=True, tensor_parallel=3), AT_TORCHRUNS)


@asynccontextmanager
async def client_of(
    process: subprocess.Popen[str],
) -> AsyncIterator[tuple[GeneratorClient, SharedMemoryModelStateDictStore]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = SharedMemoryModelStateDictStore(Path(folder))
        client = GeneratorClient(
            await asyncio.to_thread(address_of, process), lend=ModelStateDictLender(Path(folder)).lend
        )
        await client.hello("run", seed=7)
        yield client, store
        await client.leave()
        store.close()


async def ask(client: GeneratorClient, name: str, **sampling: object) -> Completion:
    return await client.generate(
        GenerationRequest(
            request_id=name,
            session_id=name,
            group_id=name,
            prompt_token_ids=np.array([1, 2, 3], np.int32),
            sampling=SamplingParams(**sampling),
        )
    )


async def generates_and_takes_over_weights(client: GeneratorClient, store: SharedMemoryModelStateDictStore) -> None:
    """Before and after, greedily; and by chance, which all ranks must draw alike."""
    for version, model in enumerate((contract_model(), contract_model(1))):
        if version:
            ref = store.publish(dict(model.named_parameters()), version)
            assert await client.load_model_state_dict(ref) == version
        done = await ask(client, f"greedy{version}", temperature=0, max_tokens=9)
        assert done.token_ids.tolist() == greedy_reference(model, [1, 2, 3], 9)
        assert set(done.policy_versions.tolist()) == {version}
    sampled = await asyncio.gather(*(ask(client, f"sampled{i}", max_tokens=20) for i in range(9)))
    assert [one.num_tokens for one in sampled] == [20] * 9


def contract_folder(folder: Path) -> str:
    contract_model().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("launcher", "engine"),
    [
        pytest.param(TORCHRUN, VLLM, id="torchrun-vllm", marks=pytest.mark.xdist_group("vllm")),
        pytest.param(TORCHRUN, (), id="torchrun-torch", marks=pytest.mark.long),
        pytest.param(ALONE, (), id="alone-torch"),
    ],
)
async def test_two_ranks_serve_as_one_and_an_idle_one_that_dies_ends_both_at_once(
    tmp_path: Path, launcher: tuple[str, ...], engine: tuple[str, ...]
) -> None:
    if engine:
        require_vllm_installed()
    arguments = ("--address", "tcp://127.0.0.1:0", *TWO_RANKS, *engine)
    with serving(*arguments, model=contract_folder(tmp_path), launcher=launcher) as process:
        async with client_of(process) as (client, store):
            await generates_and_takes_over_weights(client, store)
            await asyncio.to_thread(rank_of(process, 1).kill)
            async with asyncio.timeout(PATIENCE_S):
                failure = await client.failed()  # nothing is asked of it, and it tells all the same
        status, printed = await asyncio.to_thread(refusal, process)
        assert status == 1
        if launcher is ALONE:
            assert "rank 1 of the engine died or was ended" in str(failure)
            assert re.search("error the engine failed: .*rank 1 of the engine died or was ended", printed)
        else:  # torchrun ends rank 0 too, and tells why; it may be faster than rank 0
            assert isinstance(failure, EngineFailed)
            assert re.search(r"rank *: 1 .*exitcode *: -9 ", printed)


@pytest.mark.long
async def test_a_rank_that_dies_in_a_step_fails_all_that_runs(tmp_path: Path) -> None:
    with serving("--address", "tcp://127.0.0.1:0", *TWO_RANKS, model=contract_folder(tmp_path)) as process:
        async with client_of(process) as (client, _):
            calls = [asyncio.create_task(ask(client, f"r{i}", max_tokens=250)) for i in range(99)]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert not any(call.exception() for call in done)
            await asyncio.to_thread(rank_of(process, 1).kill)
            async with asyncio.timeout(PATIENCE_S):
                results = await asyncio.gather(*calls, return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            assert failures
            assert all(isinstance(failure, EngineFailed) and "rank" in str(failure) for failure in failures)
        assert (await asyncio.to_thread(refusal, process))[0] == 1


async def test_two_ranks_end_in_order_and_serve_one_run_only(tmp_path: Path) -> None:
    with serving("--address", "tcp://127.0.0.1:0", *TWO_RANKS, model=contract_folder(tmp_path)) as process:
        async with client_of(process) as (client, store):
            await generates_and_takes_over_weights(client, store)
            follower = rank_of(process, 1)
        second = GeneratorClient(client.address)
        with pytest.raises(SettingsError, match="served a run already"):
            await second.hello("another run")
        await second.leave()
        follower.send_signal(signal.SIGTERM)  # as launchers send it to all: it is rank 0 that ends
        process.terminate()
        status, printed = await asyncio.to_thread(refusal, process)
        assert (status, "error" in printed, follower.is_running()) == (143, False, False), printed


@pytest.mark.long
def test_a_model_that_no_rank_can_load_is_refused_like_by_one(tmp_path: Path) -> None:
    folder = Path(contract_folder(tmp_path))
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with serving("--address", "tcp://127.0.0.1:0", *TWO_RANKS, model=str(folder)) as process:
        status, printed = refusal(process)
        assert status != 0
        assert "is cut short" in printed, printed


@pytest.mark.long
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(TWO_RANKS, id="torch-lockstep"),
        pytest.param(
            (*TWO_RANKS, "--generator.engine", "vllm"),
            id="vllm-lockstep",
            marks=pytest.mark.xdist_group("vllm"),
        ),
        pytest.param(
            ("--generator.tensor_parallel", "2", "--generator.engine", "vllm"),
            id="vllm-executor",
            marks=pytest.mark.xdist_group("vllm"),
        ),
        pytest.param(
            (*("--generator.replicas", "2", "--generator.tensor_parallel", "2"), "--generator.engine", "vllm"),
            id="two-vllm-replicas",
            marks=pytest.mark.xdist_group("vllm"),
        ),
    ],
)
def test_a_run_trains_with_generators_of_two_processes(tmp_path: Path, engine: tuple[str, ...]) -> None:
    if "vllm" in engine:
        require_vllm_installed()
    with command(tmp_path, "--max_steps", "3", *engine) as run:
        status, printed = run.wait()
        assert (status, run.leftovers()) == (0, []), printed + "".join(
            path.read_text() for path in (run.folder / "logs").glob("generator*.log")
        )
    summary = read_summary(run.folder)
    assert summary.ledger.balances
    assert summary.ledger.by_state["trained"] == 12
