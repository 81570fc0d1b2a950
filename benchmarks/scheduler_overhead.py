"""CPU time of the orchestrator per one-turn rollout, from admission to packed sample, and what it does to the loop.

    python benchmarks/scheduler_overhead.py [--json] [--quick] [--case in-flight-1024 ...]

`in-flight-N`: the real scheduler, rollouter, chat rendering, scoring and batching, over environments and a `generate`
that cost nothing: requests wait in a queue until N rollouts run at once, then the oldest are answered, a few per turn
of the event loop, as an engine's thread would hand them over. So N rollouts run all the time. The trainer acknowledges
each batch at once.

`run-N`: the orchestrator as a run has it. Beside the above: the run's observer with its files, phases and trace; router
and RPC to a generator in another process, which answers as above; the bytes of each batch in shared memory, read by a
trainer in that process, which says by the event log that the step ended; the scheduler's state on disk. Of the whole
process, its threads included, but not of the other one.

Counted once that many run; the lag of the loop is that of the whole run, the first burst of admissions included.
`cpu_s_per_rollout` is user and system time of the process over trained rollouts, from the end of the first step to that
of the last; what the stand-in for the engine costs is counted with it. `loop_lag_max_s` is how much later than asked a
sleeping task went on, neighbours on the machine included; `loop_turn_max_s` is the most CPU time that one turn of the
event loop took. Rewards differ inside every group, so that everything is trained on. A batch is a quarter of what is in
flight, or 256 rollouts where that is less. Old objects are held from the garbage collector and memory is reserved, as
in a run.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from composed_run import Marks, run_composed, running
from scheduler_peers import ANSWERED_AT_ONCE, COMPLETION_TOKENS, completion_ids

from tailrace.batching import FormedBatch
from tailrace.config import RunSettings
from tailrace.environments import EnvironmentSpec, Policy
from tailrace.lifecycle.garbage import hold_old_objects
from tailrace.lifecycle.memory import reserve_memory
from tailrace.models.loading import tokenizer_folder
from tailrace.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    Group,
    OnChunk,
    Outcome,
    PlannedBatch,
    Rollout,
    RolloutId,
    StepSkipped,
    StepTrained,
    Task,
)
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter, RolloutSettings
from tailrace.scheduling import SchedulerSetup, SchedulingSettings, StreamScheduler, TaskSource, TaskStream

TARGET_S, TARGET_RUN_S, TARGET_LAG_S, TARGET_SPREAD = 80e-6, 150e-6, 0.010, 1.5
IN_FLIGHT = (1024, 4096, 16_384, 65_536)
IN_FLIGHT_OF_RUNS = (1024,)
GROUP_SIZE = 8
BEAT_S = 0.002
LEAST_ROLLOUTS = 20_000
"""That are measured."""


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    in_flight: int
    rollouts: int
    cpu_s_per_rollout: float
    loop_lag_max_s: float
    loop_lag_p99_s: float
    loop_turn_max_s: float | None
    """None in a run, whose loop has no turn that only watches it."""
    flatness: float | None
    """CPU time per rollout over that of the cheapest case of its kind; None where that is the only one."""
    target: float
    met: bool | None
    """None of an `in-flight-N` that ran alone: it cannot be told whether the cost grows."""


class InstantGenerate:
    """Answers at once, but for keeping `in_flight` requests waiting: the oldest first, a few per turn of the loop."""

    def __init__(self, in_flight: int, stop_token_id: int) -> None:
        self._in_flight = in_flight
        self._waiting: deque[asyncio.Future[Completion]] = deque()
        self._ids, self._logprobs = completion_ids(stop_token_id), np.full(COMPLETION_TOKENS, -1.0, np.float32)
        self.version = 0
        self.full = asyncio.Event()
        self._enough = asyncio.Event()

    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if len(self._waiting) >= self._in_flight:
            self.full.set()
            self._enough.set()
        return await future

    async def serve(self) -> None:
        while True:
            self._enough.clear()
            await self._enough.wait()
            while len(self._waiting) > self._in_flight - GROUP_SIZE:
                for _ in range(min(ANSWERED_AT_ONCE, len(self._waiting))):
                    future = self._waiting.popleft()
                    if not future.done():
                        future.set_result(self._completion())
                await asyncio.sleep(0)

    def _completion(self) -> Completion:
        return Completion(
            token_ids=self._ids,
            logprobs=self._logprobs,
            policy_versions=np.full(COMPLETION_TOKENS, self.version, np.int32),
            finish_reason=FinishReason.STOP,
        )


class Silent:
    """A scheduler's observer that only counts."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def rollout_finished(self, rollout: Rollout) -> None: ...

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None: ...

    def group_scored(self, group: Group, filter_reason: str | None) -> None: ...

    def part_released(self, part: Group) -> None: ...

    def batch_sent(self, formed: FormedBatch) -> None: ...

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        self._marks.add(formed.batch.summary.num_rollouts)


@dataclass
class Beat:
    """How much later than asked the loop resumes a sleeping task."""

    every_s: float = BEAT_S
    lags: list[float] = field(default_factory=list)
    longest_turn_s: float = 0.0

    async def run(self) -> None:
        while True:
            since = time.perf_counter()
            await asyncio.sleep(self.every_s)
            self.lags.append(max(0.0, time.perf_counter() - since - self.every_s))

    async def watch_turns(self) -> None:
        while True:
            since = time.thread_time()
            await asyncio.sleep(0)
            self.longest_turn_s = max(self.longest_turn_s, time.thread_time() - since)


def spec() -> EnvironmentSpec:
    count = 0

    async def agent(task: Task, policy: Policy) -> float:
        nonlocal count
        await policy.chat([{"role": "user", "content": task["text"]}])
        count += 1
        return float(count % 2)

    rows = [{"text": f"Sort these names: {number}"} for number in range(4096)]
    return EnvironmentSpec(name="instant", agent=agent, train_tasks=rows, trusted=True)


def main() -> None:
    options = kit.parse_options(__doc__)
    kinds = {"in-flight": (measure, IN_FLIGHT), "run": (measure_run, IN_FLIGHT_OF_RUNS)}
    cases = {f"{kind}-{count}": (kind, count) for kind, (_, counts) in kinds.items() for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        renderer = ChatRenderer(tokenizer_folder("bundled:quickstart", Path(folder)))
        measured: list[Row] = []
        for name in options.choose(list(cases)):
            kit.progress(name)
            kind, in_flight = cases[name]
            measured.append(run_case(kinds[kind][0](Case(name, in_flight, renderer, options.quick))))
    kit.report("Scheduler overhead", [judged(row, measured) for row in measured], options)


def judged(row: Row, measured: list[Row]) -> Row:
    kind = row.case.rpartition("-")[0]
    alike = [one.cpu_s_per_rollout for one in measured if one.case.startswith(kind)]
    met = row.cpu_s_per_rollout < row.target and row.loop_lag_max_s < TARGET_LAG_S
    if len(alike) == 1:
        return replace(row, met=met if kind == "run" else None)
    flatness = row.cpu_s_per_rollout / min(alike)
    return replace(row, flatness=flatness, met=met and flatness < TARGET_SPREAD)


def run_case(case: Coroutine[Any, Any, Row]) -> Row:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(case)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    name: str
    in_flight: int
    renderer: ChatRenderer
    quick: bool
    environment: EnvironmentSpec = field(default_factory=spec)

    @property
    def settings(self) -> SchedulingSettings:
        """A batch is a quarter of what is in flight, or 256 rollouts where that is less; twice that may wait."""
        batch_size = max(256, self.in_flight // 4)
        max_staleness = -(-2 * self.in_flight // batch_size)
        return SchedulingSettings(
            batch_size=batch_size, max_staleness=max_staleness, max_in_flight=self.in_flight, row_tokens=8192
        )

    @property
    def rollouts(self) -> RolloutSettings:
        """Of one short turn."""
        return RolloutSettings(max_tokens=COMPLETION_TOKENS, group_size=GROUP_SIZE)

    @property
    def loaded(self) -> dict[str, LoadedEnvironment]:
        """The only environment."""
        return {self.environment.name: LoadedEnvironment.of(self.environment, self.rollouts)}

    def run_settings(self) -> RunSettings:
        """Of a run whose trainer and generator do no work; its environment is given apart."""
        return RunSettings.model_validate(
            {
                "name": "measured",
                "max_steps": 1_000_000,
                "placement": "scheduler_peers:PeersLauncher",
                "model": {"name": "bundled:quickstart"},
                "environments": [{"name": "reverse-text"}],
                "rollouts": self.rollouts.model_dump(exclude_unset=True),
                "scheduling": self.settings.model_dump(exclude_unset=True),
            }
        )

    async def until_measured(self, marks: Marks) -> None:
        """From the first step that ended on."""
        await marks.reached(1)
        await marks.reached(marks.trained + max(LEAST_ROLLOUTS, (1 if self.quick else 4) * self.in_flight))

    def row(self, marks: Marks, beat: Beat, target: float, *, turn_max_s: float | None) -> Row:
        """What was measured."""
        lags = float(np.max(beat.lags)), float(np.percentile(beat.lags, 99))
        cpu_s = marks.cpu_s_per_rollout
        return Row(self.name, self.in_flight, marks.trained, cpu_s, *lags, turn_max_s, None, target, False)


async def measure(case: Case) -> Row:
    generate = InstantGenerate(case.in_flight, case.renderer.stop_token_ids[0])
    batches: asyncio.Queue[PlannedBatch] = asyncio.Queue()
    marks, beat = Marks(), Beat()
    reserve_memory(case.in_flight)
    async with Rollouter(case.rollouts, case.loaded, renderer=case.renderer, generate=generate) as rollouter:
        scheduler = StreamScheduler(
            TaskStream([TaskSource(case.environment)], seed=0),
            rollouter,
            batches.put,
            Silent(marks),
            SchedulerSetup(
                settings=case.settings,
                max_staleness=case.settings.staleness_bound("stream"),
                max_running=case.in_flight,
                group_sizes={case.environment.name: GROUP_SIZE},
            ),
        )

        async def train() -> None:
            while True:
                step = (await batches.get()).summary.step  # and lets go of the batch, as a sender does
                generate.version += 1
                scheduler.handle(StepTrained(epoch="", step=step, version=step, metrics={}))
                scheduler.weights_installed(step)  # else what starts is too old once they trail by max_staleness

        with hold_old_objects():
            async with running(beat.run(), beat.watch_turns(), scheduler.run(), generate.serve(), train()):
                await generate.full.wait()
                await case.until_measured(marks)
            scheduler.finish("measured")
    return case.row(marks, beat, TARGET_S, turn_max_s=beat.longest_turn_s)


async def measure_run(case: Case) -> Row:
    beat = Beat()
    marks = await run_composed(case.run_settings(), case.loaded, case.renderer, case.until_measured, beat.run())
    return case.row(marks, beat, TARGET_RUN_S, turn_max_s=None)


if __name__ == "__main__":
    main()
