"""The orchestrator's side of one agent worker: a process at a time, its rollouts and their requests.

    play(rollout) ─► Play ─► worker: its agent ─► Ask ─► a task here awaits `generate` ─► Answer ─► ... ─► Played
    the process ends ─► its requests are cancelled ─► every `play` raises `WorkerLost`, with the tokens known so far

A worker ends itself when a coroutine holds its event loop for too long; one that cannot even do that (it was stopped)
is killed once it has said nothing for longer still.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from tailrace.cancelling import cancelled
from tailrace.child_processes import signal_name
from tailrace.environments import AgentResult
from tailrace.environments.outside import AnswerClient
from tailrace.errors import CorruptData, LifecycleError, TailraceError, WorkerLost
from tailrace.records import Completion, Generate, Group, Rollout
from tailrace.rollouts.agent_workers.blame import MARK_BYTES, blamed
from tailrace.rollouts.agent_workers.connection import Connection
from tailrace.rollouts.agent_workers.exit_report import ExitReport
from tailrace.rollouts.agent_workers.groups import GroupData
from tailrace.rollouts.agent_workers.held import AnyHeld, Held, PlayedRollout, ReplyT, fill_with_known
from tailrace.rollouts.agent_workers.messages import (
    Answer,
    AnswerChunk,
    AnswerError,
    Ask,
    Beat,
    Cancel,
    Close,
    Failure,
    Hello,
    Opened,
    Play,
    Played,
    Ready,
    RolloutReport,
    Score,
    Scored,
    ScoredBy,
    Taken,
    Withdraw,
    first_reply_of,
    pack_task,
    unpack_report,
    unpack_rollout_report,
)
from tailrace.rollouts.agent_workers.places import KILLED_S, ProcessEnd, WorkerPlace, WorkerProcess
from tailrace.rollouts.agent_workers.watching import BeatSums
from tailrace.rollouts.deadline import CANCEL_S
from tailrace.rollouts.scoring import JudgeUsage
from tailrace.rollouts.settings import RolloutSettings
from tailrace.timeouts import timeout
from tailrace.tracing.phases import phase

CLOSE_S = 5.0
"""Seconds that a worker may take to end by itself; then it is killed."""
LEAVE_S = 2.0
"""Seconds between the end of a worker's socket and that of its process, either way round."""
CANCELLED_S = 3 * CANCEL_S
"""Seconds in which a worker that runs answers that a cancelled rollout has ended."""
_SILENCES, _LONG_SILENCES = 4, 40
"""A worker is looked at so often within the time after which one that is stopped is killed, and any other one."""


class _HasEnough(Exception):
    """The agent has heard all that it wanted of a request."""


class AgentWorker:
    """One of the workers. `start` and `ended` again and again; `play` in between."""

    def __init__(
        self, number: int, hello: Hello, settings: RolloutSettings, generate: Generate, place: WorkerPlace
    ) -> None:
        self.name = f"agent worker {number}"
        self.restarts = 0
        self.beats = BeatSums()
        self.not_loaded: dict[str, Failure] = {}
        """Environments that its newest process could not load, and did not need to. Those after it load the others."""
        self._hello, self._settings, self._generate, self._place = hello, settings, generate, place
        self._held: dict[str, AnyHeld] = {}
        """By the rollout's id, or the score's key."""
        self._numbers = itertools.count(1)
        """Of what it is told to play and score."""
        self._process: WorkerProcess | None = None
        self._ends: list[asyncio.Task[Any]] = []
        """Wait for the end of the process, and of its socket."""
        self._thread_id = 0
        self._is_ready = False
        self._killed_for = ""
        """Why the process was killed from here."""
        self.judge_usage = JudgeUsage()
        """Of judges that scored here."""
        self.has_blamed = False
        """Whether it is known which rollout, or score, ended the newest process."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes rollouts."""
        return self._is_ready

    @property
    def rollouts(self) -> int:
        """How many it holds, groups that it scores counted with them."""
        return len(self._held)

    @property
    def pid(self) -> int | None:
        """Of its process, where there is one on this machine."""
        return None if self._process is None else self._process.pid

    # ---- its process

    async def start(self, *, may_lack: bool = False) -> None:
        """Start a process, and wait until it has loaded what it needs: all that one before it had loaded, unless it
        `may_lack` some of that.

        Raises what its environments raise when they are loaded, and `LifecycleError` where it ends or takes too long.
        """
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._gone = asyncio.Event()
        self._killed_for, self._heard = "", False
        limit_s = self._settings.worker_start_timeout_s
        self._connection = Connection(self._receive, self._gone.set)
        process = self._process = await self._place.start(self._connection)
        self._ends = [loop.create_task(process.ended()), loop.create_task(self._gone.wait())]
        needs_all = self._hello.needs_all and not may_lack
        self._connection.send(msgspec.structs.replace(self._hello, name=self.name, needs_all=needs_all))
        silence = loop.create_task(self._watch_silence())
        try:
            async with timeout(limit_s):
                await asyncio.wait([self._ready, *self._ends], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self._kill(f"it was not ready within {limit_s:g} s (rollouts.worker_start_timeout_s)")
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            silence.cancel()
        if not self._ready.done():
            raise LifecycleError(str(await self.ended()))
        ready = self._ready.result()
        if ready.failure is not None:
            await self.close()
            raise ready.failure.error()
        self._thread_id, self.not_loaded = ready.thread_id, ready.not_loaded
        loaded = {name: one for name, one in self._hello.environments.items() if name not in ready.not_loaded}
        self._hello = msgspec.structs.replace(self._hello, environments=loaded, needs_all=True)  # of the next process
        self._is_ready = True

    async def ended(self) -> WorkerLost:
        """Wait until the process has ended, and end whatever it held; why that was."""
        process, silence = self._process, asyncio.create_task(self._watch_silence())
        assert process is not None  # it was started
        try:
            await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
            self._is_ready = False
            await asyncio.wait(self._ends, timeout=LEAVE_S)  # what it had sent before it ended is read first
        finally:
            self._is_ready = False
            silence.cancel()
        self._kill("it closed its socket")
        self._connection.abort()
        end = await process.ended()
        await asyncio.wait(self._ends)
        number = blamed(end.exit_report)
        to_blame = next((held for held in self._held.values() if held.number == number), None)
        lost = WorkerLost(self._why(end, to_blame))
        self.has_blamed = to_blame is not None
        await self._lose_all(lost, to_blame)
        process.close()
        self._process = None
        return lost

    def kill(self) -> None:
        """End the process at once, without waiting, also where it is stopped."""
        self._kill("the run ends at once")

    def write_stacks(self) -> None:
        """Write where its threads stand and its tasks wait into its log, soon."""
        if self._is_ready and self._process is not None:  # before it is, a signal may end it
            self._process.write_stacks()

    async def close(self) -> None:
        """End the process; where it does not end by itself, it is killed."""
        self._is_ready = False
        if (process := self._process) is not None:
            self._connection.send(Close())
            with suppress(TimeoutError):
                async with timeout(CLOSE_S):
                    await process.ended()
            self._kill("it did not end")
            self._connection.abort()
            _, waiting = await asyncio.wait(self._ends, timeout=KILLED_S + LEAVE_S)
            for end in waiting:  # the system holds it
                end.cancel()
            await self._lose_all(WorkerLost(f"{self.name} was closed"))
            process.close()
            self._process = None

    async def _watch_silence(self) -> NoReturn:
        """Kill a process that says nothing since it is stopped, or for very long although it ends itself when held."""
        limit_s = 2 * self._settings.agent_block_s + LEAVE_S
        silences = 0
        while True:
            await asyncio.sleep(limit_s / _SILENCES)
            silences = 0 if self._heard else silences + 1  # counted, since this event loop may have been held itself
            self._heard = False
            is_too_long = self._is_ready and silences >= _LONG_SILENCES  # to start has a limit of its own
            if is_too_long or (silences >= _SILENCES and self._is_stopped):
                self._kill(f"it said nothing for {silences * limit_s / _SILENCES:g} s, as a process that is stopped")

    @property
    def _is_stopped(self) -> bool:
        return self._process is not None and self._process.is_stopped

    def _kill(self, why: str) -> None:
        """End the process group at once, with whatever users' code started in it."""
        if self._process is None:
            return
        if not self._process.has_ended:
            self._killed_for = self._killed_for or why
        self._process.kill()

    def _why(self, end: ProcessEnd, to_blame: AnyHeld | None) -> str:
        """Why it ended, for people."""
        status, exit_report = end.status, end.exit_report[MARK_BYTES:]
        words = ExitReport.read(exit_report.decode(errors="replace"), self._thread_id)
        at_what = "" if to_blame is None else f" while it ran {to_blame.what}"
        if end.lost_with:
            killed = f"; it was killed: {self._killed_for}" if self._killed_for else ""
            return f"{self.name} is lost: {end.lost_with}{killed}"
        if self._killed_for:
            return f"{self.name} was killed{at_what}: {self._killed_for}"
        how = f"died of {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        if words is None:
            by = "; users' code ended it (os._exit, ...), or something outside did"
            return f"{self.name} {how}{at_what}{by}"
        if words.was_held:
            limit = f"over {self._settings.agent_block_s:g} s (rollouts.agent_block_s)"
            if not self._ready.done():
                limit = f"most of {self._settings.worker_start_timeout_s:g} s (rollouts.worker_start_timeout_s)"
            how = f"was ended, as its event loop was held for {limit} by {words.where}"
        else:
            how += f" in {words.where}"
        return f"{self.name} {how}{at_what}:\n{words.stack}"

    # ---- rollouts

    async def play(self, rollout: Rollout, *, is_evaluation: bool, tell: AnswerClient | None = None) -> PlayedRollout:
        """Play it there, and fill it with what was sampled, also where it is lost.

        `tell` answers the client outside that has claimed it, and is told where that is.
        Cancelling this ends the rollout there, and its requests here. Raises `WorkerLost`, and what else was raised.
        """
        task, number = pack_task(rollout.task), next(self._numbers)
        held = self._hold(
            rollout.rollout_id,
            f"rollout {rollout.rollout_id} of task {rollout.task.task_id}",
            Play(
                number=number,
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                task=task,
                sampling=rollout.sampling,
                attempt=rollout.attempt,
                is_evaluation=is_evaluation,
            ),
            Played,
        )
        held.tell = tell
        try:
            played = await asyncio.shield(held.ended)
        except asyncio.CancelledError:
            await self._cancel(rollout, held)
            raise
        except WorkerLost as lost:
            fill_with_known(rollout, held)
            raise lost.of_task(rollout.task.task_id) from lost
        return self._filled(rollout, played)

    async def score(self, group: Group, *, by: ScoredBy) -> list[Group] | list[AgentResult]:
        """Score a group there, and lay what came of it over this one.

        Cancelling this ends the score. Raises `WorkerLost`, and what else was raised.
        """
        number = next(self._numbers)
        key, task, data = f"score {number}", pack_task(group.task), GroupData.of(group)
        held = self._hold(
            key,
            f"the score of group {group.group_id}",
            Score(number=number, key=key, task=task, group=data, by=by),
            Scored,
        )
        try:
            scored = await asyncio.shield(held.ended)
        except asyncio.CancelledError:
            self._connection.send(Cancel(key=key))
            with suppress(TimeoutError, TailraceError):
                async with timeout(CANCELLED_S):
                    await asyncio.shield(held.ended)
            raise
        if scored.changes is None:
            raise (scored.failure or Failure("WorkerLost", f"{self.name} told of no score")).error()
        try:
            return scored.changes.applied(group)
        except CorruptData as error:
            raise WorkerLost(f"task {group.task.task_id}: {self.name}: {error}") from error

    def _hold(self, key: str, what: str, order: Play | Score, reply: type[ReplyT]) -> Held[ReplyT]:
        held = Held(what, order.number, reply, asyncio.get_running_loop().create_future())
        self._held[key] = held
        self._connection.send(order)
        return held

    async def _cancel(self, rollout: Rollout, held: Held[Played]) -> None:
        """Wait until the worker says that it has ended, or has ended itself; not for long."""
        self._connection.send(Cancel(key=rollout.rollout_id))
        for request in held.requests.values():
            request.cancel()
        try:
            async with timeout(CANCELLED_S):
                played = await asyncio.shield(held.ended)
            self._fill(rollout, played)
        except (TimeoutError, TailraceError):
            fill_with_known(rollout, held)
        except asyncio.CancelledError:
            fill_with_known(rollout, held)
            raise

    def _filled(self, rollout: Rollout, played: Played) -> PlayedRollout:
        """Raises what it failed with."""
        report = self._fill(rollout, played)
        if played.failure is not None or report.reported is None:
            raise (played.failure or Failure("WorkerLost", f"{self.name} told of no result")).error()
        return PlayedRollout(report.reported, report.scored, played.score_failure)

    def _fill(self, rollout: Rollout, played: Played) -> RolloutReport:
        """Raises `WorkerLost` for what is no rollout."""
        with phase("receive_rollout"):
            try:
                rollout.branches = [data.branch() for data in played.branches]
                rollout.first_reply = first_reply_of(played)
                report = unpack_rollout_report(played.report)
            except CorruptData as error:
                raise WorkerLost(f"task {rollout.task.task_id}: {self.name}: {error}") from error
            rollout.messages, rollout.metrics = report.messages, report.metrics
            rollout.sampled_texts = report.sampled_texts
            rollout.turns, rollout.truncated = played.turns, played.truncated
        return report

    async def _lose_all(self, lost: WorkerLost, to_blame: AnyHeld | None = None) -> None:
        """Nothing of what it held comes back; where one is to blame for that, the others are not."""
        for held in list(self._held.values()):
            await cancelled(*held.requests.values())
            if not held.ended.done():
                held.ended.set_exception(lost if to_blame in (None, held) else lost.of_another())
                held.ended.exception()  # retrieved: who waited for it may be gone
        self._held.clear()

    # ---- what it says

    def _receive(self, body: bytes) -> None:
        self._heard = True
        try:
            report = unpack_report(body)
        except CorruptData as error:
            self._kill(str(error))
            return
        match report:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(report)
            case Beat():
                self.beats.add(report)
            case Opened():
                held = self._held.get(report.rollout_id)
                if held is not None and held.tell is not None:
                    held.tell(report.answer)
            case Ask():
                self._ask(report)
            case Withdraw():
                self._withdraw(report)
            case Played():
                self._end(report.rollout_id, report if report.placed is None else self._with_branches(report))
            case Scored():
                self.judge_usage.add(report.judge)
                self._end(report.key, report)

    def _end(self, key: str, report: Played | Scored) -> None:
        if (held := self._held.get(key)) is None:
            return
        try:
            held.end(report)
        except CorruptData as error:
            self._kill(str(error))
        else:
            del self._held[key]

    def _with_branches(self, played: Played) -> Played:
        """With those that lie in shared memory; lost where they are not what was written there."""
        assert played.placed is not None  # else the message has them
        assert self._process is not None  # which sent it
        try:
            with phase("receive_rollout"):
                return msgspec.structs.replace(played, branches=self._process.read_branches(played.placed))
        except CorruptData as error:
            lost = WorkerLost(f"rollout {played.rollout_id}: {self.name}: {error}")
            return msgspec.structs.replace(played, first_reply=None, failure=Failure.of(lost))
        finally:
            self._connection.send(Taken(segment=played.placed.segment))

    def _ask(self, ask: Ask) -> None:
        held = self._held.get(ask.key)
        if held is None or ask.call_id in held.requests:
            return
        request = held.requests[ask.call_id] = asyncio.get_running_loop().create_task(self._answer(held, ask))
        request.add_done_callback(lambda _: held.requests.pop(ask.call_id, None))

    def _withdraw(self, withdrawn: Withdraw) -> None:
        held = self._held.get(withdrawn.key)
        if held is None or (request := held.requests.get(withdrawn.call_id)) is None:
            return
        if withdrawn.has_enough:
            held.enough.add(withdrawn.call_id)
        else:
            request.cancel()

    async def _answer(self, held: AnyHeld, ask: Ask) -> None:
        call_id = ask.call_id

        def forward(chunk: Completion) -> None:
            if call_id in held.enough:
                raise _HasEnough
            self._connection.send(AnswerChunk(call_id=call_id, chunk=chunk))

        try:
            completion = await self._generate(ask.request, forward if ask.wants_chunks else None)
        except _HasEnough:
            return
        except Exception as error:  # noqa: BLE001 - whoever asked raises it again
            self._connection.send(AnswerError(call_id=call_id, failure=Failure.of(error)))
            return
        held.sampled[ask.request.session_id].append(completion)
        self._connection.send(Answer(call_id=call_id, completion=completion))
