"""The agent workers of a run: each rollout goes to the one that holds the fewest, and one that ends is replaced."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

import msgspec

from tailrace.cancelling import cancelled
from tailrace.environments import AgentResult, EnvironmentSettings
from tailrace.environments.outside import AnswerClient
from tailrace.errors import LifecycleError, SettingsError, TailraceError, WorkerLost
from tailrace.records import Generate, Group, Rollout
from tailrace.rollouts.agent_workers.held import PlayedRollout
from tailrace.rollouts.agent_workers.messages import Hello, ScoredBy
from tailrace.rollouts.agent_workers.places import LocalPlace, WorkerPlace
from tailrace.rollouts.agent_workers.watching import AgentWorkerFigures, WorkerWatch
from tailrace.rollouts.agent_workers.worker import AgentWorker
from tailrace.rollouts.chat.rendering import RendererSource
from tailrace.rollouts.closing import close_all
from tailrace.rollouts.endpoints import Endpoints
from tailrace.rollouts.run_facts import RunFacts
from tailrace.rollouts.scoring import JudgeUsage
from tailrace.rollouts.settings import RolloutSettings
from tailrace.tracing.output_log import OutputLog
from tailrace.tracing.phase_totals import PhaseUsage
from tailrace.transport.channels import wait_until

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Between a process that ended with nothing played, or could not be started again, and its successor; each pause is
twice the one before."""

_TRIES, _TRIES_AGAIN = 2, 7
"""Starts in a row: somebody may have killed the first who meant another, and what one that has been there before loads
may be away for a minute."""

_STAYS = (
    "environment %r cannot be loaded in another process, so it is played beside the scheduler, where what blocks or "
    "crashes concerns the whole run: %s"
)

_logger = logging.getLogger(__name__)


class AgentWorkers:
    """Plays rollouts in processes; they start with `start`, or when the first rollout comes."""

    def __init__(
        self,
        settings: RolloutSettings,
        environments: Mapping[str, EnvironmentSettings],
        *,
        renderer: RendererSource,
        generate: Generate,
        watch: WorkerWatch,
        facts: RunFacts,
        endpoints: Endpoints | None = None,
        places: Sequence[WorkerPlace] | None = None,
    ) -> None:
        """`environments` are loaded again in every worker from these settings; the rest is as `Rollouter` takes it."""
        self._output = None if watch.log is None else OutputLog(watch.log)
        hello = Hello(
            name="",
            module_path=sys.path,
            rollouts=settings.model_dump_json(),
            environments={name: chosen.model_dump_json() for name, chosen in environments.items()},
            needs_all=settings.agent_workers != "auto",
            renderer=renderer,
            facts=facts,
            endpoints=None,
            lag_interval_s=watch.lag_interval_s,
            stall_s=watch.stall_s,
            trace_folder="" if watch.trace_folder is None else str(watch.trace_folder),
            trace_bytes=watch.trace_bytes,
        )
        self._places = places or [LocalPlace(self._output)] * settings.num_agent_workers
        self._workers = []
        for number, place in enumerate(self._places):
            own = hello if endpoints is None else msgspec.structs.replace(hello, endpoints=endpoints.entry(number))
            self._workers.append(AgentWorker(number, own, settings, generate, place))
        self._may_lack = settings.agent_workers == "auto"
        """Whether what a worker cannot load again may be played elsewhere."""
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failure: TailraceError | None = None
        self._played = 0
        """Rollouts that came back."""
        self._not_loaded: set[str] = set()
        """Environments that are played elsewhere, since a worker could not load them, at first or again."""

    async def start(self) -> None:
        """Start every worker, and wait until all take rollouts. Raises what keeps one from starting."""
        self._begin()
        await wait_until(self._changed, lambda: self._failure is not None or all(one.is_ready for one in self._workers))
        if self._failure is not None:
            raise self._failure

    async def loads(self, environment: str) -> bool:
        """Whether this environment is played here: with `auto`, one that the worker could not load is not.

        Waits until a worker is there. Raises as `play` does.
        """
        await self._least_busy()
        return environment not in self._not_loaded

    async def play(self, rollout: Rollout, *, is_evaluation: bool, tell: AnswerClient | None = None) -> PlayedRollout:
        """Play and score a rollout in the worker that holds the fewest; see `AgentWorker.play`.

        Waits for one that is there. Raises what keeps all of them from starting.
        """
        worker = await self._least_busy()
        if rollout.task.environment in self._not_loaded:  # since it was asked for
            raise WorkerLost(f"task {rollout.task.task_id}: {worker.name} could not load it again").of_another()
        played = await worker.play(rollout, is_evaluation=is_evaluation, tell=tell)
        self._played += 1
        return played

    async def score(self, group: Group, *, by: ScoredBy) -> list[Group] | list[AgentResult] | None:
        """Score a group by its environment's `score_group`, its named functions for groups, or its judge.

        Once more where the worker is lost, and wherever another rollout was to blame for that. None where its
        environment is not played here any more. Raises as `play` does.
        """
        tries_left = 2
        while True:
            worker = await self._least_busy()
            if group.task.environment in self._not_loaded:
                return None
            try:
                return await worker.score(group, by=by)
            except WorkerLost as lost:
                tries_left -= not lost.is_blameless
                if not tries_left:
                    raise

    async def _least_busy(self) -> AgentWorker:
        """Waits until one takes rollouts."""
        while True:
            if self._failure is not None:
                raise self._failure
            if ready := [one for one in self._workers if one.is_ready]:
                return min(ready, key=lambda one: one.rollouts)
            self._begin()
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """End every worker. No rollout may be running."""
        await cancelled(*self._keepers)
        await close_all({worker.name: worker.close for worker in self._workers})
        await close_all({f"the place of agent worker {n}": place.close for n, place in enumerate(self._places)})
        if self._output is not None:
            await asyncio.to_thread(self._output.close)

    def kill(self) -> None:
        """End every worker at once, without waiting."""
        for worker in self._workers:
            worker.kill()

    def write_stacks(self) -> None:
        """Of every worker, into their log, soon."""
        for worker in self._workers:
            worker.write_stacks()

    def pids(self) -> dict[str, int]:
        """Of the processes that run now, by the names of their metrics."""
        numbered = ((f"agent_worker_{number}", one.pid) for number, one in enumerate(self._workers))
        return {name: pid for name, pid in numbered if pid is not None}

    @property
    def judge_usage(self) -> JudgeUsage:
        """What judges took here so far."""
        usage = JudgeUsage()
        for worker in self._workers:
            usage.add(worker.judge_usage)
        return usage

    def flush_figures(self) -> list[AgentWorkerFigures]:
        """Of every worker; their lag since it was last asked for."""
        return [
            AgentWorkerFigures(one.pid, one.rollouts, one.restarts, one.beats.flush_lag_s()) for one in self._workers
        ]

    def flush_phases(self) -> dict[str, PhaseUsage]:
        """What phases took in all of them, since it was last asked for."""
        taken: dict[str, PhaseUsage] = {}
        for worker in self._workers:
            for name, usage in worker.beats.flush_phases().items():
                taken[name] = taken.get(name, PhaseUsage()).merged(usage)
        return taken

    def _begin(self) -> None:
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(one), name=one.name) for one in self._workers]

    async def _keep(self, worker: AgentWorker) -> None:
        """Start a worker's process, and another one whenever it ends, until none can be started."""
        pause_s = 0.0
        try:
            while True:
                await self._start(worker)
                played = self._played
                lost = await worker.ended()
                worker.restarts += 1
                goes_on = self._played > played or worker.has_blamed  # what is to blame is not tried without end
                pause_s = 0.0 if goes_on else min(2 * pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                _logger.error("%s\nA new one is started.", lost)
                await asyncio.sleep(pause_s)
        except (TailraceError, OSError) as error:
            self._failure = error if isinstance(error, SettingsError) else LifecycleError(str(error))
            self._changed.set()

    async def _start(self, worker: AgentWorker) -> None:
        """Once more where the process ends meanwhile. One that has been there before is tried again after ever longer
        pauses, and for as long as others play on, since its node may be lost; the last try need not load everything
        again where the settings leave the choice.

        Raises what keeps it from starting.
        """
        tries = left = _TRIES_AGAIN if worker.restarts else _TRIES
        pause_s = 0.0
        while True:
            try:
                await _start_process(worker, may_lack=self._may_lack and left == 1)
                break
            except LifecycleError as error:
                others_play = worker.restarts > 0 and any(one.is_ready for one in self._workers)
                left = tries if others_play else left - 1
                if not left:
                    raise
                if worker.restarts:
                    pause_s = min(2 * pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                if others_play:
                    _logger.error("%s\nOthers play on, and it is tried again in %g s.", error, pause_s)
                else:
                    _logger.warning("%s; it is started once more in %g s", error, pause_s)
                await asyncio.sleep(pause_s)
        for environment, failure in worker.not_loaded.items():
            if environment not in self._not_loaded:
                self._not_loaded.add(environment)
                _logger.warning(_STAYS, environment, failure.message)
        self._changed.set()


async def _start_process(worker: AgentWorker, *, may_lack: bool) -> None:
    """Raises as `AgentWorker.start` does, and `LifecycleError` alone for one that has been there: what it may not find
    now (its module is being saved, a server is away, the machine has no memory) it has found before.
    """
    try:
        await worker.start(may_lack=may_lack)
    except (TailraceError, OSError) as error:
        if not worker.restarts or isinstance(error, LifecycleError):
            raise
        raise LifecycleError(f"{worker.name} could not be started again: {error}") from error
