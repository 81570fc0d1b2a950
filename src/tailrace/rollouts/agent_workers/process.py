"""An agent worker: `python -m tailrace.rollouts.agent_workers.process`, started by `AgentWorkers`.

Runs agents, environments and rewards on an event loop of its own, in a process group of its own. It ends when the
orchestrator does, and when one coroutine holds its loop for too long: a thread that needs no interpreter lock then
writes down where every thread is, and ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.errors import EnvironmentFailed, RolloutError, ScoringFailed, TailraceError
from tailrace.records import Group, Rollout, Task
from tailrace.rollouts.agent_workers.blame import BlameMark, context_of
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.connection import Connection
from tailrace.rollouts.agent_workers.generating import AskedGenerate
from tailrace.rollouts.agent_workers.groups import GroupChanges
from tailrace.rollouts.agent_workers.messages import (
    Beat,
    Cancel,
    Close,
    Failure,
    Hello,
    Opened,
    Play,
    Played,
    Ready,
    Report,
    RolloutReport,
    Score,
    Scored,
    ScoredBy,
    Taken,
    pack_rollout_report,
    unpack_order,
    unpack_task,
)
from tailrace.rollouts.agent_workers.outcomes import RolloutOutcome
from tailrace.rollouts.agent_workers.segments import BranchWriter
from tailrace.rollouts.attribution import attribute_errors, exit_refused
from tailrace.rollouts.chat import ChatRenderer
from tailrace.rollouts.closing import close_all, played_with
from tailrace.rollouts.deadline import Attempts
from tailrace.rollouts.endpoints import Endpoints
from tailrace.rollouts.environment import LoadedEnvironment
from tailrace.rollouts.playing import RolloutPlayer, leave_out_empty_branches, limited
from tailrace.rollouts.policy import RolloutPolicy
from tailrace.rollouts.scoring import JudgeUsage, RelativeJudge
from tailrace.rollouts.scoring.judge import Chat
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers.pool import WorkerPool
from tailrace.rollouts.workers.starting import restore_python_path
from tailrace.timeouts import timeout
from tailrace.tracing.lag import LoopLagMonitor
from tailrace.tracing.log_files import log_to_stderr
from tailrace.tracing.phases import OTHER, PhaseRecorder, phase
from tailrace.tracing.stacks import write_stacks_when_asked
from tailrace.tracing.traces import open_trace
from tailrace.tracing.watched_tasks import watching_task_factory

_BEAT_S = 0.5
_LOOKS_PER_LIMIT = 5
"""How often it is looked within `agent_block_s` whether the event loop has gone on."""

_START_SHARE = 0.9
"""Of the time to start in: then the process says itself where it hangs, before it is killed."""

_MOST_THREADS = 1024
"""Of the event loop, as beside the orchestrator; asyncio's are few, and synchronous agents wait in them for replies."""

ResultT = TypeVar("ResultT")

_logger = logging.getLogger(__name__)


class AgentWorkerProcess:
    """The rollouts that are played here."""

    def __init__(self, end: socket.socket, stacks: int, segments: Sequence[int]) -> None:
        """`end` of the pair of sockets that leads to the orchestrator; `stacks` is the file of the exit report, and
        `segments` are shared memory for branches."""
        self._end, self._stacks = end, stacks
        self._branches = BranchWriter(segments)
        self._attempts = Attempts()
        self._running: dict[str, asyncio.Task[None]] = {}
        """Rollouts and scores, by their keys."""
        self._environments: dict[str, LoadedEnvironment] = {}
        self._chats: dict[str, Chat] = {}
        """With judges at endpoints, by environment."""
        self._endpoints: Endpoints | None = None

    async def run(self) -> None:
        """Until the orchestrator closes."""
        write_stacks_when_asked()
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[Hello] = loop.create_future()
        self._closed = asyncio.Event()
        self._connection = await Connection.over(self._end, self._receive, _end_group)
        self._generate = AskedGenerate(self._connection.send)
        hello = await self._hello
        sys.path[:] = hello.module_path
        self._name = hello.name
        settings = RolloutSettings.model_validate_json(hello.rollouts)
        self._expect_end_within(_START_SHARE * settings.worker_start_timeout_s)
        loadable = {
            name: EnvironmentSettings.model_validate_json(chosen) for name, chosen in hello.environments.items()
        }
        workers = WorkerPool(settings, loadable)
        try:
            try:
                not_loaded = self._load(hello, settings, loadable, workers)
                if self._endpoints is not None:
                    await self._endpoints.start()
            except Exception as error:  # noqa: BLE001 - the orchestrator raises it again
                self._connection.send(Ready(thread_id=0, failure=Failure.of(error)))
                await self._closed.wait()
                return
            with self._recording(hello) as phases:
                self._context = contextvars.copy_context()
                async with LoopLagMonitor(hello.lag_interval_s, stall_s=hello.stall_s, phases=phases) as lag:
                    self._connection.send(Ready(thread_id=threading.get_ident(), not_loaded=not_loaded))
                    with self._ending_when_held(settings.agent_block_s, phases):
                        await self._beat_until_closed(settings.agent_block_s, lag, phases)
        finally:
            await close_all(played_with(workers, self._chats, self._environments, self._endpoints))
            faulthandler.cancel_dump_traceback_later()

    # ---- what it is started with

    def _load(
        self, hello: Hello, settings: RolloutSettings, loadable: dict[str, EnvironmentSettings], workers: WorkerPool
    ) -> dict[str, Failure]:
        """Environments and renderer: users' modules are imported here. Why some environments were not loaded."""
        not_loaded = {}
        self._endpoints = None if hello.endpoints is None else hello.endpoints.make()
        for name, chosen in loadable.items():
            try:
                spec = load_environment(chosen, with_tasks=False)
            except TailraceError as error:
                if hello.needs_all:
                    raise
                not_loaded[name] = Failure.of(error)
            else:
                self._environments[name] = LoadedEnvironment.of(spec, settings, chosen)
        source = hello.renderer
        self._player = RolloutPlayer(
            settings,
            renderer=ChatRenderer(source.folder, name=source.name, thinking_retention=source.thinking_retention),
            generate=self._generate,
            workers=workers,
            facts=hello.facts,
            endpoints=self._endpoints,
        )
        return not_loaded

    @contextlib.contextmanager
    def _recording(self, hello: Hello) -> Iterator[PhaseRecorder]:
        folder, max_bytes = hello.trace_folder, hello.trace_bytes
        trace = open_trace(Path(folder), hello.name, max_bytes=max_bytes) if folder else None
        try:
            with PhaseRecorder(trace, other=f"{OTHER} ({hello.name})").recording() as phases:
                turns = BlameMark(self._stacks, phases.clock())
                asyncio.get_running_loop().set_task_factory(watching_task_factory(turns))
                yield phases
        finally:
            if trace is not None:
                trace.close()

    async def _beat_until_closed(self, limit_s: float, lag: LoopLagMonitor, phases: PhaseRecorder) -> None:
        """Say how the loop runs, now and then."""
        while not self._closed.is_set():
            self._connection.send(Beat(lag_max_s=lag.flush().max_s, phases=phases.flush()))
            with contextlib.suppress(TimeoutError):
                async with timeout(min(_BEAT_S, limit_s / _LOOKS_PER_LIMIT)):
                    await self._closed.wait()

    @contextlib.contextmanager
    def _ending_when_held(self, limit_s: float, phases: PhaseRecorder) -> Iterator[None]:
        """End the process where no task has taken a turn for `limit_s`.

        A thread puts the end off whenever one has: thousands of tasks that are ready at once hold the loop for long
        without any of them being to blame. Beats are turns, too.
        """
        has_left = threading.Event()

        def watch() -> None:
            seen = -1
            while not has_left.wait(limit_s / _LOOKS_PER_LIMIT):
                if (turns := phases.turns) != seen:
                    seen = turns
                    self._expect_end_within(limit_s)

        self._expect_end_within(limit_s)
        thread = threading.Thread(target=watch, name="watch over the event loop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_left.set()
            thread.join()

    def _expect_end_within(self, limit_s: float) -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stacks)

    # ---- what it is told

    def _receive(self, body: bytes) -> None:
        match order := unpack_order(body):
            case Hello():
                self._hello.set_result(order)
            case Play():
                self._begin(order.rollout_id, order.number, self._play(order), partial(_lost_rollout, order))
            case Score():
                self._begin(order.key, order.number, self._score(order), partial(_lost_score, order))
            case Cancel():
                if (running := self._running.get(order.key)) is not None:
                    running.cancel()
            case Taken():
                self._branches.taken(order.segment)
            case Close():
                self._closed.set()
            case _:
                self._generate.answered(order)

    def _begin(self, key: str, number: int, work: Coroutine[Any, Any, None], lost: Callable[[Failure], Report]) -> None:
        """In the context of the recording of phases; that of the connection is older."""
        task = self._running[key] = asyncio.create_task(work, name=key, context=context_of(number, self._context))
        task.add_done_callback(partial(self._ended, key, lost))

    def _ended(self, key: str, lost: Callable[[Failure], Report], task: asyncio.Task[None]) -> None:
        """Say so where it could not say itself what came of it, which is waited for."""
        self._running.pop(key, None)
        if task.cancelled():  # before it began: later it says so itself
            self._connection.send(lost(Failure("RolloutError", f"{key} was cancelled")))
        elif (error := task.exception()) is not None:
            _logger.error("%s could not be reported", key, exc_info=error)
            self._connection.send(lost(Failure.of(error)))

    async def _score(self, order: Score) -> None:
        """Score a group; say what came of it, whatever that is."""
        task = unpack_task(order.task)
        group, environment = order.group.group(task), self._environments[task.environment]
        members, failure, changes = list(group.rollouts), None, None
        judge = self._judge(order, environment) if order.by is ScoredBy.JUDGE else None
        try:
            with phase("score_group", track="groups", about={"group": group.group_id}):
                scoring = limited(self._scoring(order.by, group, environment, judge), group, environment)
                returned = await self._attempts.run(
                    _uninterrupted(scoring, task, ScoringFailed),
                    what=f"task {task.task_id}: score_group of group {group.group_id}",
                    limit_s=environment.score_timeout.limit_s,
                )
            with attribute_errors(task, ScoringFailed):
                changes = GroupChanges.of(returned, group, members)
        except asyncio.CancelledError:
            failure = Failure("RolloutError", f"the score of group {group.group_id} was cancelled")
        except Exception as error:  # noqa: BLE001 - the orchestrator raises it again
            failure = Failure.of(error)
        usage = JudgeUsage() if judge is None else judge.usage
        self._connection.send(Scored(key=order.key, changes=changes, judge=usage, failure=failure))

    async def _scoring(
        self, by: ScoredBy, group: Group, environment: LoadedEnvironment, judge: RelativeJudge | None
    ) -> object:
        if judge is not None:
            return await judge(group)
        if by is ScoredBy.REWARDS:
            return await self._player.functions.score_group(group, environment.spec)
        score_group = environment.spec.score_group
        assert score_group is not None  # it is asked for of environments that have one
        return await score_group(group)

    def _judge(self, order: Score, environment: LoadedEnvironment) -> RelativeJudge:
        """One for each score, so that what it takes is known; connections to an endpoint are kept."""
        spec = environment.spec
        chat = self._chats.get(spec.name)
        if chat is None:
            name = f"judge/{self._name}/{order.key}"
            chat = self._player.judge_chat(spec, generate=self._generate.of(order.key), name=name)
        if spec.judge is not None and spec.judge.url is not None:
            self._chats[spec.name] = chat
        return RelativeJudge(chat, spec.judge, form=spec.judge_format)

    async def _play(self, order: Play) -> None:
        """Play and score a rollout, whose limit counts from here; say what came of it, whatever that is."""
        task = unpack_task(order.task)
        environment = self._environments[task.environment]
        rollout = Rollout(
            order.rollout_id,
            order.group_id,
            task,
            order.sampling,
            started_s=asyncio.get_running_loop().time(),
            attempt=order.attempt,
        )
        policy = self._player.policy(rollout, environment, is_evaluation=order.is_evaluation)
        outcome = RolloutOutcome()
        try:
            with phase("rollout", track="rollouts", about={"rollout": order.rollout_id, "attempt": order.attempt}):
                await self._attempts.run(
                    self._attempt(rollout, policy, environment, outcome),
                    what=f"task {task.task_id}: rollout {order.rollout_id}",
                    limit_s=environment.deadline.limit_s,
                    stop=policy.stop,
                )
        except asyncio.CancelledError:
            outcome.failure = Failure("RolloutError", f"rollout {order.rollout_id} was cancelled")
        except Exception as error:  # noqa: BLE001 - the orchestrator raises it again
            outcome.failure = Failure.of(error)
        leave_out_empty_branches(rollout)
        self._connection.send(self._played(rollout, outcome))

    async def _attempt(
        self, rollout: Rollout, policy: RolloutPolicy, environment: LoadedEnvironment, outcome: RolloutOutcome
    ) -> None:
        task = rollout.task

        def tell(answer: bytes) -> bool:
            self._connection.send(Opened(rollout_id=rollout.rollout_id, answer=answer))
            return True  # where its client has gone, the orchestrator cancels the rollout

        outcome.reported = await _uninterrupted(self._player.play(rollout, policy, environment, tell=tell), task)
        if not environment.spec.scores_rollouts:
            return
        try:
            with phase("score"):
                outcome.scored = await _uninterrupted(self._player.score(rollout, outcome.reported, environment), task)
        except TailraceError as error:
            outcome.score_failure = Failure.of(error)

    def _played(self, rollout: Rollout, outcome: RolloutOutcome) -> Played:
        packed = outcome.packed(rollout)
        branches = [BranchData.of(branch) for branch in rollout.branches]
        placed = self._branches.place(branches)
        return Played(
            rollout_id=rollout.rollout_id,
            branches=branches if placed is None else [],
            placed=placed,
            turns=rollout.turns,
            truncated=rollout.truncated,
            report=packed,
            first_reply=rollout.first_reply,
            failure=outcome.failure,
            score_failure=outcome.score_failure,
        )


def _lost_rollout(order: Play, failure: Failure) -> Played:
    """What it has sampled is not known."""
    return Played(
        rollout_id=order.rollout_id,
        branches=[],
        placed=None,
        turns=0,
        truncated=False,
        report=pack_rollout_report(RolloutReport([], {}, None, None)),
        failure=failure,
    )


def _lost_score(order: Score, failure: Failure) -> Scored:
    return Scored(key=order.key, judge=JudgeUsage(), failure=failure)


async def _uninterrupted(
    work: Coroutine[Any, Any, ResultT], task: Task, failure: type[RolloutError] = EnvironmentFailed
) -> ResultT:
    """What users' code returns. No user interrupts this process: where its code says so, that is its `failure`."""
    try:
        return await work
    except KeyboardInterrupt as error:
        raise exit_refused(error, task, failure) from error


class _OwnSelector(selectors.DefaultSelector):
    """Of the event loop in this very process: what users' code forked ends where it comes back to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if os.getpid() != self._owner:
            os._exit(0)
        return super().select(timeout)


def main() -> int:
    """Play rollouts until the orchestrator says that it is over, or is gone."""
    restore_python_path()
    signal.signal(signal.SIGTERM, lambda *_: None)  # to all of a job: the orchestrator decides, and closes
    os.dup2(2, 1)  # what users' code prints goes to the log
    end_number, stacks, *segments = map(int, sys.argv[1:])
    end = socket.socket(fileno=end_number)
    for descriptor in (end_number, stacks, *segments):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(stacks)
    log_to_stderr()
    selector = _OwnSelector()
    os.register_at_fork(after_in_child=lambda: _disconnect((end_number, stacks), selector))
    loop = asyncio.SelectorEventLoop(selector)
    loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="tailrace-loop"))
    asyncio.set_event_loop(loop)
    working = loop.create_task(AgentWorkerProcess(end, stacks, segments).run())
    while not working.done():
        try:
            loop.run_until_complete(working)
        except (SystemExit, KeyboardInterrupt) as error:  # of a task that users' code made: whoever awaits it gets it
            _logger.error("users' code raised %r in a task of its own, which ends no run", error)
        except Exception:  # noqa: BLE001 - the orchestrator shows the end of this log
            break
    failure = working.exception() if working.done() and not working.cancelled() else None
    if failure is not None:
        _logger.error("the agent worker failed", exc_info=failure)
    logging.shutdown()
    _end_group(0 if working.done() and failure is None else 1)


def _disconnect(descriptors: tuple[int, ...], selector: selectors.BaseSelector) -> None:
    """In a process that users' code forked: it must neither write to the orchestrator nor change what is waited for."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for one in (*descriptors, *([selector.fileno()] if hasattr(selector, "fileno") else [])):
            os.dup2(nothing, one, inheritable=False)
        os.close(nothing)


def _end_group(status: int = 1) -> NoReturn:
    """End now, and with it whatever users' code started in this process group."""
    if os.getpgrp() == os.getpid() and status:
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(status)


if __name__ == "__main__":
    main()
