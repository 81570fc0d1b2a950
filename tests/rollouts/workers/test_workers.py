"""Synchronous user code in real worker processes: what never returns costs one rollout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.errors import EnvironmentFailed, InvalidReward, RolloutError, RolloutTimeout, SettingsError
from tailrace.records import Completion, GenerationRequest, GroupId, OnChunk, Rollout, RolloutId, Task, TaskId
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter, RolloutSettings, WorkerPool
from tailrace.rollouts.error_budget import ERRORS_KEPT
from tailrace.tracing.output_log import OutputLog
from tests.support.collected import left_to_collector
from tests.support.descendants import still_run
from tests.support.scripted_generate import ScriptedGenerate

PATIENCE_S = 60.0
HANGS = {"worker_timeout_s": 5.0}
"""Where something never returns; others have that long, too."""
WRONG_CODE = {"exit", "unserializable", "no observation", "not a number"}
NAMES = ("counting", "judged")
ENVIRONMENTS = {name: EnvironmentSettings(name=f"tests.support.untrusted_environments:{name}") for name in NAMES}
SPECS = {name: load_environment(settings) for name, settings in ENVIRONMENTS.items()}


class Run:
    """A rollouter with real workers and scripted replies per rollout."""

    def __init__(self, renderer: ChatRenderer, log: Path | None = None, **settings: float) -> None:
        values: dict[str, float] = {"workers": 1, "worker_timeout_s": PATIENCE_S, "max_tokens": 32, **settings}
        self.settings = RolloutSettings.model_validate(values)
        self.renderer = renderer
        self.scripts: dict[str, Sequence[str]] = {}
        environments = {
            name: LoadedEnvironment.of(spec, self.settings, ENVIRONMENTS[name]) for name, spec in SPECS.items()
        }
        self.rollouter = Rollouter(
            self.settings, environments, renderer=renderer, generate=self._generate, worker_log=log
        )

    async def _generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        assert request.owner is not None
        scripted = self._scripted.setdefault(
            request.session_id, ScriptedGenerate(self.renderer.tokenizer, self.scripts[request.owner])
        )
        return await scripted(request, on_chunk)

    _scripted: dict[str, ScriptedGenerate]

    async def __aenter__(self) -> Run:
        self._scripted = {}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rollouter.close()

    async def rollout(self, name: str, behave: str = "well", replies: Sequence[str] = ("a", "b", "c")) -> Rollout:
        rollout_id = f"{name}-{len(self.scripts)}"
        self.scripts[rollout_id] = replies
        task = Task(TaskId(f"{name}/train/0"), name, 0, {"behave": behave}, seed=4)
        return await self.rollouter.run(task, rollout_id=RolloutId(rollout_id), group_id=GroupId("g"))


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if is_worker(child)]


def is_worker(child: psutil.Process) -> bool:
    try:
        return "workers.process" in " ".join(child.cmdline())
    except psutil.NoSuchProcess:  # it ended meanwhile
        return False


async def test_an_untrusted_environment_runs_in_a_worker(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        rollout = await run.rollout("counting")
    assert rollout.reward is not None
    assert rollout.reward.value == 1.5
    assert rollout.reward.components["steps"] == 3
    assert rollout.reward.components["pid"] != os.getpid()
    assert rollout.reward.columns == {"trail": "well:4 a b c"}
    assert rollout.metrics["environment_s"] > 0
    assert children() == []


async def test_a_reward_that_never_returns_costs_one_rollout(renderer: ChatRenderer) -> None:
    async with Run(renderer, **HANGS) as run:
        results = await asyncio.gather(
            *(run.rollout("judged", behave) for behave in ("well", "hang", "parts", "well")), return_exceptions=True
        )
    lost = [result for result in results if isinstance(result, BaseException)]
    assert [type(error) for error in lost] == [RolloutTimeout]
    assert "judged/train/0: the reward function did not return within 5 s" in str(lost[0])
    kept = [result.reward for result in results if isinstance(result, Rollout)]
    assert [reward.value for reward in kept if reward] == [1.0, 0.5, 1.0]
    assert children() == []


async def test_rollouts_whose_worker_raises_are_freed_without_the_collector(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        await run.rollout("counting")
        with left_to_collector(Rollout) as left:
            rollouts = (run.rollout("counting", replies=["raise"]) for _ in range(ERRORS_KEPT + 8))
            lost = await asyncio.gather(*rollouts, return_exceptions=True)
            assert {type(error) for error in lost} == {EnvironmentFailed}
            del rollouts, lost
            await asyncio.sleep(0)
    assert left == []


async def test_rollouts_beside_a_killed_one_are_rebuilt_where_they_were(renderer: ChatRenderer) -> None:
    async with Run(renderer, **HANGS) as run:
        good, lost, also_good = await asyncio.gather(
            run.rollout("counting"),
            run.rollout("counting", replies=["a", "hang"]),
            run.rollout("counting", replies=["x", "y", "z"]),
            return_exceptions=True,
        )
    assert isinstance(lost, RolloutTimeout)
    assert isinstance(good, Rollout)
    assert isinstance(also_good, Rollout)
    for rollout, trail in ((good, "well:4 a b c"), (also_good, "well:4 x y z")):
        assert rollout.reward is not None
        assert rollout.reward.columns["trail"] == trail
        assert rollout.reward.value == 1.5


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ("die", EnvironmentFailed, r"step of the environment ended its worker process \(status 3\)"),
        ("raise", EnvironmentFailed, "(?s)ZeroDivisionError: of the user.*untrusted_environments.py"),
        ("exit", EnvironmentFailed, "(?s)step of the environment raised SystemExit: 4.*untrusted_environments.py"),
        ("panic", EnvironmentFailed, "step of the environment raised Panic: of native code"),
        ("unserializable", EnvironmentFailed, "a object cannot leave a worker process"),
        ("no observation", EnvironmentFailed, "reset and step return an Observation"),
        ("not a number", InvalidReward, "a step's reward is 'much'"),
    ],
)
async def test_an_environment_that_fails_costs_its_rollout_and_the_next_one_runs(
    renderer: ChatRenderer, reply: str, error: type[RolloutError], message: str
) -> None:
    async with Run(renderer) as run:
        with pytest.raises(error, match=message) as raised:
            await run.rollout("counting", replies=[reply])
        assert "counting/train/0" in str(raised.value)
        assert raised.value.is_mistake == (reply in WRONG_CODE)
        assert (await run.rollout("counting")).reward is not None
    assert children() == []


async def test_so_do_environments_that_hang(renderer: ChatRenderer) -> None:
    async with Run(renderer, workers=2, **HANGS) as run:
        in_reset, in_a_step = await asyncio.gather(
            run.rollout("counting", "hang in reset"),
            run.rollout("counting", replies=["hang in a child"]),
            return_exceptions=True,
        )
        for error, what in ((in_reset, "reset"), (in_a_step, "step")):
            assert isinstance(error, RolloutTimeout)
            assert f"counting/train/0: {what} of the environment did not return within 5 s" in str(error)
            assert not error.is_mistake
        rollouts = await asyncio.gather(*(run.rollout("counting") for _ in range(2)))
        assert all(rollout.reward is not None for rollout in rollouts)
    assert children() == []


@pytest.mark.parametrize("trouble", ["fork", "wait for a fork", "leave a thread", "block signals"])
async def test_code_that_misbehaves_and_returns_is_answered_once_and_ends_with_its_worker(
    renderer: ChatRenderer, trouble: str
) -> None:
    async with Run(renderer) as run:
        first = await run.rollout("counting", replies=[trouble, "b", trouble])
        others = [await run.rollout("counting", replies=[letter, "y", "z"]) for letter in "ab"]
    trails = [rollout.reward.columns["trail"] for rollout in (first, *others) if rollout.reward]
    assert trails == [f"well:4 {trouble} b {trouble}", "well:4 a y z", "well:4 b y z"]
    assert children() == []


@pytest.mark.parametrize("behave", ["nan", "text", "none"])
async def test_a_reward_from_a_worker_must_be_a_finite_number(renderer: ChatRenderer, behave: str) -> None:
    async with Run(renderer) as run:
        with pytest.raises(InvalidReward, match="judged/train/0"):
            await run.rollout("judged", behave)


async def test_a_reward_that_is_no_real_number_is_a_mistake(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        with pytest.raises(EnvironmentFailed, match=r"judged/train/0.* a complex cannot leave a worker") as raised:
            await run.rollout("judged", "complex")
    assert raised.value.is_mistake


async def test_numbers_of_numpy_and_fractions_cross_over(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        rollout = await run.rollout("counting", replies=["numpy"])
        by_fraction = await run.rollout("judged", "fraction")
    assert by_fraction.reward is not None
    assert by_fraction.reward.value == 0.25
    assert rollout.reward is not None
    assert rollout.reward.value == 0.5
    assert rollout.reward.columns["array"] == [0, 1, 2]


async def test_what_user_code_prints_goes_to_the_log(renderer: ChatRenderer, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    async with Run(renderer, log) as run:
        rollout = await run.rollout("counting", replies=["print", "b", "c"])
    assert rollout.reward is not None
    assert "to the log" in log.read_text()


async def test_the_rollouts_own_time_limit_ends_a_call_and_its_worker_serves_the_next(renderer: ChatRenderer) -> None:
    async with Run(renderer, timeout_s=0.1, worker_timeout_s=30) as run:
        with pytest.raises(RolloutTimeout, match=r"not finished after 0.1 s \(rollouts.timeout_s\)"):
            await run.rollout("judged", "sleep")
        with pytest.raises(RolloutTimeout):
            await run.rollout("judged", "sleep")  # its worker still owes an answer


async def test_a_cancelled_call_does_not_disturb_the_answers_of_later_ones(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async with Run(renderer) as run:
        await run.rollout("judged")
        waiting = asyncio.create_task(run.rollout("judged", f"wait {tmp_path}"))
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110 - another process's file has no event
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0)
        (tmp_path / "end").touch()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rollout = await run.rollout("judged", "parts")
        assert rollout.reward is not None
        assert rollout.reward.columns == {"said": "a"}


async def test_workers_can_be_started_before_the_first_rollout(renderer: ChatRenderer) -> None:
    async with Run(renderer, workers=2) as run:
        await run.rollouter.start()
        assert len(children()) == 2
        assert (await run.rollout("counting")).reward is not None
    async with Run(renderer, workers=0) as run:
        with pytest.raises(SettingsError, match="'counting' has synchronous code"):
            await run.rollouter.start()


async def test_an_environment_that_takes_too_long_to_load_names_the_limit_of_that() -> None:
    slowly = EnvironmentSettings(name="tests.support.untrusted_environments:loading_slowly")
    pool = WorkerPool(RolloutSettings(worker_start_timeout_s=1), {"loading_slowly": slowly})
    says = r"loading environment 'loading_slowly' did not return within 1 s \(rollouts\.worker_start_timeout_s\)"
    with pytest.raises(ExceptionGroup) as raised:
        await pool.start(["loading_slowly"])
    assert raised.group_contains(RolloutTimeout, match=says)
    await pool.close()
    assert children() == []


async def test_several_workers_share_the_rollouts(renderer: ChatRenderer) -> None:
    async with Run(renderer, workers=2) as run:
        rollouts = await asyncio.gather(*(run.rollout("counting") for _ in range(4)))
        assert len(children()) == 2
    assert len({rollout.reward.components["pid"] for rollout in rollouts if rollout.reward}) == 2


async def test_without_workers_untrusted_code_is_refused_with_what_to_do(renderer: ChatRenderer) -> None:
    async with Run(renderer, workers=0) as run:
        with pytest.raises(SettingsError, match=r"rollouts.workers is 0; make it async, or say `trusted = true`"):
            await run.rollout("counting")


def test_a_worker_ends_when_its_parent_vanishes_even_in_an_endless_call() -> None:
    """The parent is killed while its worker spins; the worker must be gone soon after."""
    code = """
    import asyncio, os, psutil, signal
    from tailrace.environments import EnvironmentSettings
    from tailrace.records import Task, TaskId
    from tailrace.rollouts import RolloutSettings, WorkerPool

    async def main():
        settings = EnvironmentSettings(name="tests.support.untrusted_environments:judged")
        pool = WorkerPool(RolloutSettings(), {"judged": settings})
        await pool.start(["judged"])
        (worker,) = psutil.Process().children()
        before_s = worker.cpu_times().user
        call = asyncio.create_task(pool.reward(Task(TaskId("t"), "judged", 0, {"behave": "hang"}), []))
        while worker.cpu_times().user < before_s + 0.3:
            await asyncio.sleep(0.02)
        print(worker.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    with contextlib.suppress(psutil.NoSuchProcess):  # it is gone
        assert still_run([psutil.Process(int(done.stdout))], PATIENCE_S) == []


@pytest.mark.parametrize(("name", "behave"), [("judged", "hang"), ("counting", "hang in reset")])
async def test_cancelling_a_rollout_ends_what_it_called_in_a_worker(
    renderer: ChatRenderer, name: str, behave: str
) -> None:
    async with Run(renderer, worker_timeout_s=600, timeout_s=600) as run:
        await run.rollout("judged")
        (worker,) = children()
        before_s = worker.cpu_times().user
        hanging = asyncio.create_task(run.rollout(name, behave))
        while worker.cpu_times().user < before_s + 0.3:  # noqa: ASYNC110  (nothing tells of a call that loops)
            await asyncio.sleep(0.02)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert still_run([worker], PATIENCE_S) == []
        assert (await run.rollout(name)).reward is not None
    assert children() == []


def test_what_a_process_prints_without_end_takes_no_more_than_two_files(tmp_path: Path) -> None:
    output = OutputLog(tmp_path / "workers.log", max_bytes=100_000)
    with output.writer() as log:
        loop = "for number in range(9000): print(number, 'and more of the same text')"
        process = subprocess.Popen([sys.executable, "-c", loop], stdout=log)
    assert process.wait(PATIENCE_S) == 0
    output.close()
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(files) <= {"workers.log", "workers.log.1"}
    assert sum(files.values()) <= 2 * (100_000 + (1 << 16))
    newest = tmp_path / ("workers.log" if "workers.log" in files else "workers.log.1")
    assert newest.read_text().endswith("8999 and more of the same text\n")
