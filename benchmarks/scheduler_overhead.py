"""CPU time of the orchestrator per one-turn rollout, from admission to packed sample, and what it does to the loop.

    python benchmarks/scheduler_overhead.py [--json] [--quick] [--case in-flight-1024 ...]

The real scheduler, rollouter, chat rendering, scoring and batching, over environments and a `generate` that cost
nothing: requests wait in a queue until `in_flight` rollouts run at once, then the oldest are answered, a few per turn
of the event loop, as an engine's thread would hand them over. So `in_flight` rollouts run all the time. The trainer
acknowledges each batch at once. Counted once that many run; the lag of the loop is that of the whole run, the first
burst of admissions included.

`cpu_s_per_rollout` is user and system time of the process over trained rollouts, the median over steps; what the
stand-in for the engine costs is counted with it. `loop_lag_max_s` is how much later than asked a sleeping task went on,
neighbours on the machine included; `loop_turn_max_s` is the most CPU time that one turn of the event loop took. Rewards
differ inside every group, so that everything is trained on. A batch is a quarter of what is in flight, or 256 rollouts
where that is less. Old objects are held from the garbage collector and memory is reserved, as in a run.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from kit import parse_options, progress, report

from tailrace.batching import FormedBatch
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
from tailrace.scheduling import SchedulingSettings, StreamScheduler, TaskSource, TaskStream

TARGET_S, TARGET_LAG_S, TARGET_SPREAD = 150e-6, 0.010, 1.5
IN_FLIGHT = (1024, 4096, 16_384, 65_536)
GROUP_SIZE, COMPLETION_TOKENS, ANSWERED_AT_ONCE = 8, 16, 16
BEAT_S = 0.002


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    in_flight: int
    rollouts: int
    cpu_s_per_rollout: float
    loop_lag_max_s: float
    loop_lag_p99_s: float
    loop_turn_max_s: float
    flatness: float | None
    """CPU time per rollout over that of the cheapest case."""
    target: float
    met: bool


class InstantGenerate:
    """Answers at once, but for keeping `in_flight` requests waiting: the oldest first, a few per turn of the loop."""

    def __init__(self, in_flight: int, stop_token_id: int) -> None:
        self._in_flight = in_flight
        self._waiting: deque[asyncio.Future[Completion]] = deque()
        ids = np.arange(10, 10 + COMPLETION_TOKENS, dtype=np.int32)
        ids[-1] = stop_token_id
        self._ids, self._logprobs = ids, np.full(COMPLETION_TOKENS, -1.0, np.float32)
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

    def __init__(self) -> None:
        self.trained = 0
        self.marks: list[tuple[float, int]] = []
        """CPU time and trained rollouts at the end of each step."""
        self._awaited: list[tuple[int, asyncio.Event]] = []

    async def reached(self, trained: int) -> None:
        """Waits until so many rollouts are trained."""
        if self.trained < trained:
            event = asyncio.Event()
            self._awaited.append((trained, event))
            await event.wait()

    def rollout_finished(self, rollout: Rollout) -> None: ...

    def rollout_ended(self, rollout_id: RolloutId, rollout: Rollout | None, outcome: Outcome, message: str) -> None: ...

    def group_scored(self, group: Group, filter_reason: str | None) -> None: ...

    def part_released(self, part: Group) -> None: ...

    def batch_sent(self, formed: FormedBatch) -> None: ...

    def step_ended(self, event: StepTrained | StepSkipped, formed: FormedBatch) -> None:
        self.trained += formed.batch.summary.num_rollouts
        self.marks.append((time.process_time(), self.trained))
        for trained, reached in self._awaited:
            if self.trained >= trained:
                reached.set()


@dataclass
class Beat:
    """How much later than asked the loop resumes a sleeping task."""

    lags: list[float] = field(default_factory=list)
    longest_turn_s: float = 0.0

    async def run(self) -> None:
        while True:
            since = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self.lags.append(max(0.0, time.perf_counter() - since - BEAT_S))

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
    options = parse_options(__doc__)
    names = {f"in-flight-{count}": count for count in IN_FLIGHT}
    with tempfile.TemporaryDirectory() as folder:
        renderer = ChatRenderer(tokenizer_folder("bundled:quickstart", Path(folder)))
        measured = []
        for name in options.choose(list(names)):
            progress(name)
            measured.append(run_case(name, names[name], renderer, quick=options.quick))
    cheapest = min(row.cpu_s_per_rollout for row in measured)
    report("Scheduler overhead", [judged(row, cheapest) for row in measured], options)


def judged(row: Row, cheapest: float) -> Row:
    flatness = row.cpu_s_per_rollout / cheapest
    met = row.cpu_s_per_rollout < TARGET_S and flatness < TARGET_SPREAD and row.loop_lag_max_s < TARGET_LAG_S
    return Row(**{**row.__dict__, "flatness": flatness, "met": met})


def run_case(name: str, in_flight: int, renderer: ChatRenderer, *, quick: bool) -> Row:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(name, in_flight, renderer, rounds=1 if quick else 4))


async def measure(name: str, in_flight: int, renderer: ChatRenderer, *, rounds: int) -> Row:
    environment, batch_size = spec(), max(256, in_flight // 4)
    generate = InstantGenerate(in_flight, renderer.stop_token_ids[0])
    batches: asyncio.Queue[PlannedBatch] = asyncio.Queue()
    observer, beat = Silent(), Beat()
    max_staleness = -(-2 * in_flight // batch_size)
    reserve_memory(in_flight)
    rollouts = RolloutSettings(max_tokens=COMPLETION_TOKENS)
    loaded = {environment.name: LoadedEnvironment.of(environment, rollouts)}
    async with Rollouter(rollouts, loaded, renderer=renderer, generate=generate) as rollouter:
        scheduler = StreamScheduler(
            TaskStream([TaskSource(environment)], seed=0),
            rollouter,
            batches.put,
            observer,
            settings=SchedulingSettings(batch_size=batch_size),
            max_staleness=max_staleness,
            max_running=in_flight,
            group_sizes={environment.name: GROUP_SIZE},
        )

        async def train() -> None:
            while True:
                step = (await batches.get()).summary.step  # and lets go of the batch, as a sender does
                generate.version += 1
                scheduler.handle(StepTrained(epoch="", step=step, version=step, metrics={}))

        with hold_old_objects():
            coroutines = (beat.run(), beat.watch_turns(), scheduler.run(), generate.serve(), train())
            tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
            await generate.full.wait()
            await observer.reached(1)
            await observer.reached(observer.trained + max(20_000, rounds * in_flight))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            scheduler.finish("measured")
    lag_max_s, lag_p99_s = float(np.max(beat.lags)), float(np.percentile(beat.lags, 99))
    pairs = list(zip(observer.marks[:-1], observer.marks[1:], strict=True))
    cpu_s = float(np.median([(after[0] - before[0]) / (after[1] - before[1]) for before, after in pairs]))
    return Row(
        name, in_flight, observer.trained, cpu_s, lag_max_s, lag_p99_s, beat.longest_turn_s, None, TARGET_S, False
    )


if __name__ == "__main__":
    main()
