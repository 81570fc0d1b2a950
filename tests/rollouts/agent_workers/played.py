"""Rollouts in real agent workers, or on the loop of the test, over scripted replies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from tailrace.environments import EnvironmentSettings, JudgeSettings, load_environment
from tailrace.records import (
    Completion,
    GenerationRequest,
    Group,
    GroupId,
    Json,
    OnChunk,
    Rollout,
    RolloutId,
    Task,
    TaskId,
)
from tailrace.rollouts import ChatRenderer, Endpoints, LoadedEnvironment, Rollouter, RolloutSettings
from tailrace.rollouts.agent_workers import AgentWorkers, WorkerPlace, WorkerWatch
from tailrace.rollouts.error_budget import ErrorBudget
from tests.support.descendants import still_run
from tests.support.scripted_generate import ScriptedGenerate

PATIENCE_S = 60.0
GONE_S = 5.0
"""In which the system buries what was killed, and a thread of zmq's closes what was closed."""


class Run:
    """A rollouter whose environments run in `workers` processes; none: on this loop."""

    def __init__(
        self,
        renderer: ChatRenderer,
        *names: str,
        workers: int | Literal["auto"] = 1,
        watch: WorkerWatch | None = None,
        args: dict[str, Json] | None = None,
        judge: JudgeSettings | None = None,
        score_errors: ErrorBudget | None = None,
        block_s: float = PATIENCE_S,
        max_turns: int = 16,
        timeout_s: float = 600.0,
        start_timeout_s: float = 120.0,
        endpoints: Endpoints | None = None,
        places: Sequence[WorkerPlace] | None = None,
        **scripted: int | bool,
    ) -> None:
        self.settings = RolloutSettings(
            max_tokens=32,
            max_turns=max_turns,
            timeout_s=timeout_s,
            worker_start_timeout_s=start_timeout_s,
            agent_workers=workers,
            agent_block_s=block_s,
            score_errors=score_errors or ErrorBudget(),
        )
        chosen = {
            name: EnvironmentSettings(name=f"tests.support.agent_environments:{name}", args=args or {}, judge=judge)
            for name in names or ("agents",)
        }
        environments = {
            name: LoadedEnvironment.of(load_environment(one), self.settings, one, is_apart=workers != 0)
            for name, one in chosen.items()
        }
        self.renderer, self._scripted_options = renderer, scripted
        self.scripted: dict[str, ScriptedGenerate] = {}
        self.judge = ScriptedGenerate(renderer.tokenizer, ["the verdict"] * 8)
        """Answers what has no owner."""
        self.lost: dict[str, Rollout] = {}
        self.asked: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set once the rollout has asked for a completion."""
        self.held: set[str] = set()
        """Rollouts whose requests are not answered."""
        self.aborted: list[str] = []
        self.rollouter = Rollouter(
            self.settings,
            environments,
            renderer=renderer,
            generate=self._generate,
            watch=watch,
            endpoints=endpoints,
            agent_places=places,
        )
        self.runner = self.rollouter.runner(on_lost=lambda rollout: self.lost.update({rollout.rollout_id: rollout}))

    async def _generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        if request.owner is None:
            return await self.judge(request, on_chunk)
        self.asked[request.owner].set()
        if request.owner in self.held:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append(request.owner)
        return await self.scripted[request.owner](request, on_chunk)

    @property
    def agents(self) -> AgentWorkers:
        agents = self.rollouter.agent_workers
        assert agents is not None
        return agents

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rollouter.close()

    def begin(
        self,
        behave: str = "well",
        replies: Sequence[str | Exception] = ("yes", "no"),
        name: str = "agents",
        row: Mapping[str, Json] | None = None,
    ) -> asyncio.Task[Rollout]:
        """`row` is the task's in place of one that says how to `behave`."""
        rollout_id = f"{name}-{len(self.scripted)}"
        self.scripted[rollout_id] = ScriptedGenerate(
            self.renderer.tokenizer,
            replies,
            **self._scripted_options,  # type: ignore[arg-type]
        )
        task = Task(TaskId(f"{name}/train/0"), name, 0, {"behave": behave} if row is None else row, seed=4)
        return asyncio.create_task(
            self.runner.run(task, rollout_id=RolloutId(rollout_id), group_id=GroupId("g"), attempt=1)
        )

    async def rollout(
        self, behave: str = "well", replies: Sequence[str | Exception] = ("yes", "no"), name: str = "agents"
    ) -> Rollout:
        return await self.begin(behave, replies, name)


async def until_it_holds(num_rollouts: int, run: Run) -> None:
    await until(lambda: run.agents.flush_figures()[0].rollouts == num_rollouts)


async def score_in_a_killed_worker(run: Run, member: Rollout, module: Path) -> asyncio.Task[list[Group]]:
    """Of its group, whose only worker is killed over it, once what that needs to load its environment is gone."""
    (pid,) = run.agents.pids().values()
    os.kill(pid, signal.SIGSTOP)
    scoring = asyncio.create_task(run.rollouter.score(Group(GroupId("g"), member.task, [member])))
    await until_it_holds(1, run)
    module.unlink()
    os.kill(pid, signal.SIGKILL)
    return scoring


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)


def processes() -> set[psutil.Process]:
    """All below this one that run: of agent workers, and of whatever tests before these left for their like."""
    return {*still_run(psutil.Process().children(recursive=True), 0)}


def sockets() -> set[str]:
    """Open sockets and deleted files of this process."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if "socket:" in target or "deleted" in target:
            found.add(target)
    return found
