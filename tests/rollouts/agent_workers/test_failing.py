"""Whatever users' code does in an agent worker costs the rollouts that it held, is told by its name, leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Literal

import psutil
import pytest
from typing_extensions import override

from tailrace.errors import EnvironmentFailed, InvalidReward, LifecycleError, RolloutTimeout, SettingsError, WorkerLost
from tailrace.records import Group, GroupId, Rollout
from tailrace.rollouts import ChatRenderer
from tailrace.rollouts.agent_workers import WorkerWatch
from tailrace.rollouts.agent_workers.places import LocalPlace, LocalProcess
from tailrace.rollouts.agent_workers.pool import LONGEST_PAUSE_S
from tailrace.rollouts.error_budget import ErrorBudget
from tests.rollouts.agent_workers.played import (
    PATIENCE_S,
    Run,
    processes,
    score_in_a_killed_worker,
    until,
    until_it_holds,
)
from tests.support.clocks import move_clock
from tests.support.collected import left_to_collector
from tests.support.descendants import still_run

BLOCK_S = 2.0
"""Where something holds a worker's loop."""


@pytest.mark.parametrize(
    ("behave", "where"),
    [
        ("sleep", r"its event loop was held for over 2 s .* by misbehave \(.*agent_environments.py:\d+\)"),
        ("spin", r"its event loop was held for over 2 s .* by spin \(.*agent_environments.py:\d+\)"),
        ("crash", r"died of SIGSEGV in misbehave \(.*agent_environments.py:\d+\) while it ran rollout agents-0"),
        ("exit", r"ended with status 3 while it ran rollout agents-0 of task agents/train/0"),
    ],
)
async def test_a_worker_that_ends_costs_what_it_held_and_is_replaced(
    renderer: ChatRenderer, behave: str, where: str
) -> None:
    async with Run(renderer, block_s=BLOCK_S) as run:
        run.held.add("agents-1")
        bystander_waits = run.begin(behave), run.begin()
        lost = await asyncio.gather(*bystander_waits, return_exceptions=True)
        assert [type(error) for error in lost] == [WorkerLost, WorkerLost]
        assert [error.is_blameless for error in lost if isinstance(error, WorkerLost)] == [False, True]
        with pytest.raises(WorkerLost, match=f"agents/train/0: agent worker 0 .*{where}"):
            raise lost[0]  # type: ignore[misc]
        assert run.lost["agents-0"].num_completion_tokens > 0  # what was sampled for it is known
        assert run.aborted == ["agents-1"]
        assert (await run.rollout()).reward is not None
        (figures,) = run.agents.flush_figures()
        assert (figures.restarts, figures.rollouts) == (1, 0)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        ("sys.exit", r"users' code raised SystemExit\(3\)"),
        ("interrupt", r"users' code raised KeyboardInterrupt\(\)"),
        ("panic", r"Panic: of native code"),
        ("panic in parallel", r"Panic: in a task"),
        ("panic in the reward", r"Panic: of the reward"),
        ("fails to convert", r"what the rollout reported: has no storage"),
        ("panics while it converts", r"what the rollout reported: in an array"),
        ("exit in a task", r"users' code raised SystemExit\(4\)"),
        ("exit in the reward", r"users' code raised SystemExit\(5\)"),
        ("raise in the reward", r"ZeroDivisionError: of the reward"),
        ("raise what has no text", "Speechless: <its text cannot be had: RuntimeError>"),
        ("raise half a character", r"ValueError: \\ud83d"),
        ("ask for half a token", r"TypeError: chat\(max_tokens=1.5\) takes whole numbers"),
    ],
)
async def test_an_exit_that_python_raises_costs_its_own_rollout_alone(
    renderer: ChatRenderer, behave: str, message: str
) -> None:
    async with Run(renderer, "graded") as run:
        lost, kept = await asyncio.gather(
            run.rollout(behave, name="graded"), run.rollout(name="graded"), return_exceptions=True
        )
        assert isinstance(lost, EnvironmentFailed), lost
        assert not isinstance(kept, BaseException), kept
        with pytest.raises(EnvironmentFailed, match=f"graded/train/0: .*{message}"):
            raise lost
        assert run.agents.flush_figures()[0].restarts == 0


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("behave", "message", "is_mistake"),
    [
        ("forget to await", r"is <coroutine .*\(coroutine\); it must be a number", True),
        ("complex", r"is 1j \(complex\); it must be a number", True),
        ("huge", "is 1.61e\\+60; at most 3.4e\\+38", False),
        ("complex metric", "component 'part', is 1j .*; it must be a number", True),
        ("forget to await in the reward", "is <coroutine .*; it must be a number", True),
    ],
)
async def test_what_is_no_reward_fails_alike_wherever_its_agent_runs_and_what_was_said_is_kept(
    renderer: ChatRenderer, workers: int, behave: str, message: str, is_mistake: bool
) -> None:
    name = "earns_by_function" if "in the reward" in behave else "earns"
    async with Run(renderer, name, workers=workers) as run:
        of_what = f"task {name}/train/0: the reward of rollout {name}-0"
        with pytest.raises(InvalidReward, match=f"{of_what},? {message}") as raised:
            await run.rollout(behave, name=name)
        assert (raised.value.reason, raised.value.is_mistake) == ("invalid_reward", is_mistake)
        assert [message["content"] for message in run.lost[f"{name}-0"].messages] == ["go", "yes"]


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_metric_that_is_none_costs_neither_the_others_nor_info(renderer: ChatRenderer, workers: int) -> None:
    async with Run(renderer, "earns", workers=workers, score_errors=ErrorBudget(on_error="keep_unscored")) as run:
        rollout = await run.rollout("complex metric", name="earns")
    assert rollout.reward is None
    assert "part" not in rollout.metrics
    assert (rollout.metrics["turns"], rollout.metadata["said"]) == (1.0, "yes")


@pytest.mark.parametrize(("behave", "is_mistake"), [("object as info", True), ("huge info", False)])
async def test_info_that_cannot_be_sent_is_a_mistake_by_its_type_and_costs_nothing_that_was_said(
    renderer: ChatRenderer, behave: str, is_mistake: bool
) -> None:
    async with Run(renderer, "earns") as run:
        with pytest.raises(EnvironmentFailed, match="task earns/train/0: what the rollout reported: ") as raised:
            await run.rollout(behave, name="earns")
        assert raised.value.is_mistake == is_mistake
        assert [message["content"] for message in run.lost["earns-0"].messages] == ["go", "yes"]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("behave", "name", "value"),
    [("a fraction", "earns", 0.25), ("forget to await", "earns_by_function", 0.5)],
)
async def test_a_reward_that_counts_is_taken_in_a_worker_as_on_the_loop(
    renderer: ChatRenderer, workers: int, behave: str, name: str, value: float
) -> None:
    """Of any class of numbers; what the agent itself returned does not matter where a function says another one."""
    async with Run(renderer, name, workers=workers) as run:
        rollout = await run.rollout(behave, name=name)
    assert rollout.reward is not None
    assert rollout.reward.value == value


async def test_a_worker_that_cannot_tell_what_came_of_a_rollout_says_so(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        with pytest.raises(LifecycleError, match="an agent worker failed: RuntimeError: a defect"):
            await run.rollout("break its worker")


async def test_a_copy_that_users_code_forked_neither_plays_nor_speaks(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        rollouts = await asyncio.gather(run.rollout("fork"), run.rollout(), run.rollout("fork"))
        assert [rollout.turns for rollout in rollouts] == [2, 2, 2]
        assert [len(run.scripted[rollout.rollout_id].calls) for rollout in rollouts] == [2, 2, 2]
        assert run.agents.flush_figures()[0].restarts == 0


@pytest.mark.parametrize("behave", ["leave a process", "leave a thread", "block signals"])
async def test_what_users_code_leaves_behind_ends_with_its_worker(renderer: ChatRenderer, behave: str) -> None:
    async with Run(renderer) as run:
        assert (await run.rollout(behave)).turns == 2  # and nothing is left, as after every test here


async def test_agents_that_compute_by_turns_may_hold_a_worker_for_longer_together(
    renderer: ChatRenderer,
) -> None:
    async with Run(renderer, block_s=BLOCK_S) as run:
        rollouts = await asyncio.gather(*(run.rollout("compute") for _ in range(8)))  # 3.2 s in one turn of the loop
        assert [rollout.turns for rollout in rollouts] == [2] * 8
        assert run.agents.flush_figures()[0].restarts == 0


async def test_a_worker_that_is_stopped_is_killed_and_replaced(renderer: ChatRenderer) -> None:
    async with Run(renderer, block_s=BLOCK_S) as run:
        run.held.add("agents-0")
        held = run.begin()
        await run.asked["agents-0"].wait()
        (pid,) = run.agents.pids().values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="agent worker 0 was killed: it said nothing for 6 s"):
            await held
        assert (await run.rollout()).turns == 2


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 3, "signal 37")])
async def test_a_worker_that_is_killed_from_outside_is_replaced(renderer: ChatRenderer, number: int, name: str) -> None:
    async with Run(renderer) as run:
        run.held.add("agents-0")
        held = run.begin()
        await run.asked["agents-0"].wait()
        (pid,) = run.agents.pids().values()
        os.kill(pid, number)
        with pytest.raises(WorkerLost, match=f"agent worker 0 died of {name}"):
            await asyncio.wait_for(held, 60)
        assert (await run.rollout()).turns == 2


async def test_rollouts_that_are_lost_with_their_worker_are_freed_without_the_collector(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        await run.rollout()
        with left_to_collector(Rollout) as left:
            bystanders = [f"agents-{number}" for number in range(1, 5)]
            run.held.update(bystanders)
            rollouts = [run.begin() for _ in bystanders]
            for rollout_id in bystanders:
                await run.asked[rollout_id].wait()
            lost = await asyncio.gather(run.begin("exit"), *rollouts, return_exceptions=True)
            assert {type(error) for error in lost} == {WorkerLost}
            del rollouts, lost
            run.lost.clear()
            await asyncio.sleep(0)
    assert left == []


@pytest.fixture
def short_pause_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """The first between tries to start a worker again."""
    monkeypatch.setattr("tailrace.rollouts.agent_workers.pool.FIRST_PAUSE_S", 0.01)
    return 0.01


@pytest.mark.usefixtures("short_pause_s")
async def test_a_worker_that_has_played_may_be_killed_again_and_again_while_it_is_started(
    renderer: ChatRenderer,
) -> None:
    async with Run(renderer) as run:
        await run.rollout()
        killed: set[int] = set()
        while len(killed) < 4:
            for pid in {*run.agents.pids().values()} - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0.01)
        assert (await run.rollout()).turns == 2


class SlowMachine(LocalPlace):
    """One that takes its time to start a process."""

    start_s = 0.0

    @override
    async def start(self, protocol: asyncio.Protocol) -> LocalProcess:
        await asyncio.sleep(self.start_s)
        return await super().start(protocol)


async def test_time_for_which_there_is_no_worker_counts_towards_no_rollouts_limit(renderer: ChatRenderer) -> None:
    limit_s = 2.0
    machine = SlowMachine(None)
    async with Run(renderer, places=[machine], timeout_s=limit_s) as run:
        await run.rollout()
        machine.start_s = 1.5 * limit_s
        os.kill(run.agents.pids()["agent_worker_0"], signal.SIGKILL)
        await until(lambda: run.agents.flush_figures()[0].restarts == 1)
        rollouts = await asyncio.gather(*(run.rollout() for _ in range(4)))
    assert [rollout.turns for rollout in rollouts] == [2] * 4
    assert all(rollout.ended_s - rollout.started_s > limit_s for rollout in rollouts)


async def test_time_for_which_there_is_no_worker_counts_towards_no_limit_of_a_groups_score(
    renderer: ChatRenderer,
) -> None:
    limit_s = 2.0
    machine = SlowMachine(None)
    async with Run(renderer, "ranked", places=[machine], timeout_s=limit_s) as run:
        member = await run.rollout(name="ranked")
        (pid,) = run.agents.pids().values()
        os.kill(pid, signal.SIGSTOP)
        scoring = asyncio.create_task(run.rollouter.score(Group(GroupId("g"), member.task, [member])))
        await until_it_holds(1, run)
        machine.start_s = 1.5 * limit_s
        os.kill(pid, signal.SIGKILL)
        (group,) = await scoring
    assert group.metrics["score_group_s"] > limit_s


async def test_a_groups_score_that_hangs_in_a_worker_is_ended_there(renderer: ChatRenderer) -> None:
    async with Run(renderer, "ranked", timeout_s=2.0) as run:
        member = await run.rollout("wait in the score", name="ranked")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RolloutTimeout, match=r"not finished after 2 s \(rollouts.timeout_s\).* in rank "):
                await run.rollouter.score(Group(GroupId("g"), member.task, [member]))
        assert run.agents.flush_figures()[0].restarts == 0


class Machine(LocalPlace):
    """One that may have no memory for another process."""

    is_full = False

    @override
    async def start(self, protocol: asyncio.Protocol) -> LocalProcess:
        if self.is_full:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return await super().start(protocol)


@pytest.mark.parametrize(
    ("is_full", "workers"), [(False, 1), (False, "auto"), (True, 1)], ids=["module", "module, auto", "memory"]
)
async def test_a_worker_that_cannot_be_started_again_is_tried_again_while_others_play(
    renderer: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_full: bool,
    workers: int | Literal["auto"],
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_PARENT", str(os.getpid()))
    (module := tmp_path / "own.py").touch()
    machine, args = Machine(None), {"path": str(module)}
    places = [machine, LocalPlace(None)]
    async with Run(renderer, "ranked_while", workers=workers, places=places, args=args) as run:
        await run.agents.start()
        machine.is_full = is_full
        if not is_full:
            module.unlink()
        os.kill(run.agents.pids()["agent_worker_0"], signal.SIGKILL)
        await until(lambda: "Others play on" in caplog.text)
        assert "agent worker 0 could not be started again: " in caplog.text
        assert ("Cannot allocate memory" if is_full else "RuntimeError: half saved") in caplog.text
        assert (await run.rollout(name="ranked_while")).turns == 2
        machine.is_full = False
        module.touch()
        await move_clock(monkeypatch, LONGEST_PAUSE_S)
        await run.agents.start()
        assert len(run.agents.pids()) == 2


async def test_what_the_one_worker_cannot_load_again_is_played_beside_the_scheduler_where_the_choice_is_left(
    renderer: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    short_pause_s: float,
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_PARENT", str(os.getpid()))
    (module := tmp_path / "own.py").touch()
    async with Run(renderer, "ranked_while", workers="auto", args={"path": str(module)}) as run:
        member = await run.rollout(name="ranked_while")
        assert [pid_of(member)] == [*run.agents.pids().values()]
        (group,) = await (await score_in_a_killed_worker(run, member, module))
        assert pid_of(group.rollouts[0]) == os.getpid()
        assert pid_of(await run.rollout(name="ranked_while")) == os.getpid()
    assert pauses_in(caplog.text) == [short_pause_s * 2**number for number in range(6)]
    assert caplog.text.count("environment 'ranked_while' cannot be loaded in another process") == 1


async def test_the_one_worker_that_cannot_load_again_what_was_asked_of_it_ends_the_run(
    renderer: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    short_pause_s: float,
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_PARENT", str(os.getpid()))
    (module := tmp_path / "own.py").touch()
    async with Run(renderer, "ranked_while", args={"path": str(module)}) as run:
        await run.rollout(name="ranked_while")
        module.unlink()
        os.kill(run.agents.pids()["agent_worker_0"], signal.SIGKILL)
        await until(lambda: run.agents.flush_figures()[0].restarts == 1)
        with pytest.raises(LifecycleError, match=r"agent worker 0 could not be started again: .*half saved"):
            await run.rollout(name="ranked_while")
    assert pauses_in(caplog.text) == [short_pause_s * 2**number for number in range(6)]


def pauses_in(log: str) -> list[float]:
    """Those between tries to start a worker again."""
    return [float(pause_s) for pause_s in re.findall(r"it is started once more in ([\d.]+) s", log)]


async def test_a_worker_that_is_stopped_while_it_starts_is_killed_and_started_once_more(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Run(renderer, block_s=BLOCK_S) as run:
        playing = run.begin()
        while not run.agents.pids():  # noqa: ASYNC110  (nothing tells of a process that has begun)
            await asyncio.sleep(0.01)
        (pid,) = run.agents.pids().values()
        os.kill(pid, signal.SIGSTOP)
        assert (await playing).turns == 2
    assert "agent worker 0 was killed: it said nothing for 6 s, as a process that is stopped" in caplog.text


async def test_an_environment_that_cannot_be_loaded_there_says_why(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_PARENT", str(os.getpid()))
    async with Run(renderer, "broken") as run:
        with pytest.raises(SettingsError, match="RuntimeError: only in the parent"):
            await run.rollout(name="broken")
    async with Run(renderer, "broken", args={"ends": True}) as run:
        with pytest.raises(LifecycleError, match="agent worker 0 ended with status 7"):
            await run.rollout(name="broken")


async def test_an_environment_that_no_other_process_can_load_stays_where_workers_are_not_asked_for(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_PARENT", str(os.getpid()))
    async with Run(renderer, "broken", "agents", workers="auto") as run:
        await run.rollouter.start()
        here, also_here, there = await asyncio.gather(
            run.rollout(name="broken"), run.rollout(name="broken"), run.rollout(name="agents")
        )
        assert {pid_of(here), pid_of(also_here)} == {os.getpid()}
        assert {pid_of(there)} == set(run.agents.pids().values())
    warnings = [record.getMessage() for record in caplog.records if "played beside the scheduler" in record.message]
    assert len(warnings) == 1
    assert "environment 'broken' cannot be loaded in another process" in warnings[0]
    assert "RuntimeError: only in the parent" in warnings[0]


def pid_of(rollout: Rollout) -> float:
    """Of the process that played it."""
    assert rollout.reward is not None
    return rollout.reward.components["pid"]


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        ("sys.exit", r"users' code raised SystemExit\(3\)"),
        ("panic", "Panic: of native code"),
        ("panic in parallel", "Panic: in a task"),
    ],
)
async def test_what_is_no_exception_costs_one_rollout_on_the_loop_itself(
    renderer: ChatRenderer, behave: str, message: str
) -> None:
    async with Run(renderer, workers=0) as run:
        with pytest.raises(EnvironmentFailed, match=f"agents/train/0: {message}"):
            await run.rollout(behave)
        assert (await run.rollout()).turns == 2


async def test_a_rollout_that_is_cancelled_before_its_worker_began_it_is_held_no_longer(renderer: ChatRenderer) -> None:
    async with Run(renderer) as run:
        await run.rollout()
        (pid,) = run.agents.pids().values()
        os.kill(pid, signal.SIGSTOP)
        unseen = run.begin("wait")
        await until_it_holds(1, run)
        unseen.cancel()
        await asyncio.sleep(0.05)  # by then both messages lie in its socket
        os.kill(pid, signal.SIGCONT)
        await until_it_holds(0, run)


async def test_closing_while_a_worker_starts_leaves_nothing(renderer: ChatRenderer) -> None:
    before = processes()
    async with Run(renderer, workers=2) as run:
        starting = asyncio.create_task(run.rollouter.start())
        while processes() <= before:  # noqa: ASYNC110  (nothing tells of a process that has begun)
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait({starting})


async def test_what_agents_print_and_the_trace_are_in_the_runs_folder(renderer: ChatRenderer, tmp_path: Path) -> None:
    watch = WorkerWatch(tmp_path / "agent_workers.log", tmp_path / "trace", 1_000_000)
    async with Run(renderer, watch=watch) as run:
        await run.rollout("print")
    assert "said by an agent" in (tmp_path / "agent_workers.log").read_text()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["agent worker 0.events"]
    assert '"rollout"' in (tmp_path / "trace" / "agent worker 0.events").read_text()


async def test_workers_that_are_asked_tell_where_their_agents_wait(renderer: ChatRenderer, tmp_path: Path) -> None:
    log = tmp_path / "agent_workers.log"
    async with Run(renderer, watch=WorkerWatch(log)) as run:
        run.rollouter.write_stacks()  # there is none yet
        waiting = run.begin("wait")
        async with asyncio.timeout(PATIENCE_S):
            while not log.exists() or "in misbehave\n    await asyncio.sleep(600)" not in log.read_text():
                run.rollouter.write_stacks()
                await asyncio.sleep(0.05)
        waiting.cancel()
    assert "thread 0x" in log.read_text().lower()


async def test_the_orchestrators_loop_goes_on_while_a_worker_is_blocked(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Run(renderer, workers=2, block_s=BLOCK_S) as run:
        await run.rollouter.start()
        blocked = run.begin("spin")
        await run.asked["agents-0"].wait()
        beside = [await run.rollout() for _ in range(4)]
        assert [rollout.turns for rollout in beside] == [2, 2, 2, 2]
        assert not blocked.done()
        with caplog.at_level(logging.ERROR), pytest.raises(WorkerLost):
            await blocked
        assert "by spin (" in caplog.text


ORCHESTRATOR = """
import asyncio, sys
from tailrace.rollouts import ChatRenderer
from tests.rollouts.agent_workers.played import Run

async def main():
    run = Run(ChatRenderer(sys.argv[1]), workers=2, block_s=2.0)
    await run.rollouter.start()
    blocked = run.begin("spin")
    await run.asked["agents-0"].wait()
    print(*run.agents.pids().values(), flush=True)
    await blocked

asyncio.run(main())
"""


async def test_workers_end_when_the_orchestrator_is_killed_also_one_that_is_blocked(renderer: ChatRenderer) -> None:
    orchestrator = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ORCHESTRATOR, renderer.source.folder), stdout=asyncio.subprocess.PIPE
    )
    assert orchestrator.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in (await orchestrator.stdout.readline()).split()]
    assert len(workers) == 2
    orchestrator.kill()
    await orchestrator.wait()
    assert await asyncio.to_thread(still_run, workers, PATIENCE_S) == []
