"""One simulated run: the real scheduler, rollouter, router and batching over modelled engines and a modelled trainer.

StreamScheduler ─► Rollouter ─► agent ─► Router ─► ModelledReplica      (versions come back as weights)
       └──────── batches ─► ModelledTrainer ─► publish ──────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tailrace.cancelling import cancelled
from tailrace.environments import EnvironmentSpec
from tailrace.generation.holding import HoldingGenerate
from tailrace.rollouts import LoadedEnvironment, Rollouter, RolloutSettings
from tailrace.rollouts.attribution import leaves_of
from tailrace.scheduling import SchedulerSetup, StreamScheduler, TaskSource, TaskStream, Verdict
from tailrace.simulation.environment import ENVIRONMENT, Disturbance, modelled_environment
from tailrace.simulation.fleet import ModelledFleet
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.metering import MeteredGenerate, SimulationObserver, Totals
from tailrace.simulation.rendering import ModelledRenderer
from tailrace.simulation.settings import SimulationPlan
from tailrace.simulation.trainer import Checkpoint, Hiccup, ModelledTrainer, StepEnded
from tailrace.simulation.virtual_time import run_in_virtual_time

RUN_ENDED = "run_ended"

_ENOUGH_TASKS = 65_536

_SAMPLES = 600
"""Points of the timeline, about."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster at one time."""

    time_s: float
    running: int
    """Requests that hold a slot."""
    is_training: bool


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of a simulated run. Figures are of the time after warm-up, unless they say otherwise."""

    plan: SimulationPlan
    duration_s: float
    """Of the whole run, in virtual time."""
    measured: Totals
    length_mean: float
    """Of a completion, as the load has it."""
    length_ratio: float
    """Mean full length of trained rollouts over that of all that were begun."""
    loss_length_ratio: float
    """Mean tokens with loss of trained rollouts over the same."""
    staleness: Mapping[int, int]
    """Tokens that bore loss, by their staleness."""
    waited_s: Mapping[Verdict, float]
    """Seconds that admission was held, by what held it; whole run."""
    outcomes: Mapping[str, int]
    """Rollouts by terminal state and reason; whole run."""
    timeline: list[Moment] = field(repr=False)
    journal: list[str] = field(repr=False)

    @property
    def groups_per_s(self) -> float:
        """Trained; of groups that are released in parts, their rollouts over the size of a group."""
        measured = self.measured
        if self.plan.scheduling.group_release == "early":
            return measured.trained_rollouts / self.plan.load.group_size / measured.time_s
        return measured.trained_groups / measured.time_s

    @property
    def loss_tokens_per_s(self) -> float:
        """Trained, and bearing loss."""
        return self.measured.loss_tokens / self.measured.time_s

    @property
    def bound_ratio(self) -> float:
        """Groups per second over `capacity_groups_per_s`."""
        return self.groups_per_s / capacity_groups_per_s(self.plan, self.length_mean)

    @property
    def engine_utilization(self) -> float:
        """Tokens sampled over those of engines whose every slot is always taken."""
        return self.measured.sampled_tokens / (self.measured.time_s * self.plan.engines.tokens_per_s)

    @property
    def trainer_utilization(self) -> float:
        """Share of the time that it had a batch, or was sending weights."""
        return 1 - self.measured.trainer_idle_s / self.measured.time_s

    @property
    def wasted_share(self) -> float:
        """Tokens of rollouts that are never trained on, over all sampled; those masked entirely are among them."""
        return max(0, self.measured.ended_tokens - self.measured.trained_tokens) / self.measured.ended_tokens

    @property
    def wholly_stale_share(self) -> float:
        """The part of `wasted_share` that was too old when its group was trained on; 0 under `on_stale = drop`."""
        if self.plan.scheduling.on_stale == "drop":
            return 0.0
        return self.measured.wholly_stale_tokens / self.measured.ended_tokens

    @property
    def masked_share(self) -> float:
        """Tokens without loss because they are stale, those of rollouts masked entirely included, over the same."""
        return self.measured.masked_tokens / self.measured.ended_tokens + self.wholly_stale_share

    @property
    def staleness_mean(self) -> float:
        """Of tokens that bear loss."""
        return self.measured.staleness_sum / self.measured.loss_tokens

    @property
    def staleness_max(self) -> int:
        """Of tokens that bear loss."""
        return max((age for age, tokens in self.staleness.items() if tokens), default=0)


def capacity_groups_per_s(plan: SimulationPlan, length_mean: float) -> float:
    """What engines and trainer can do, the lesser of the two, if nothing ever waited.

    Engines: every slot always taken, less prefill and the stalls for new weights. Trainer: a step and its sync.
    """
    rollouts, load, engines = plan.scheduling.batch_size, plan.load, plan.engines
    tokens = rollouts * load.turns * length_mean
    read = rollouts * load.turns * load.prompt_tokens * engines.prefill_s_per_token / engines.replicas
    stall_s = plan.trainer.sync_s if plan.trainer.sync_holds_engines else 0.0
    generating_s = tokens / engines.tokens_per_s + read + stall_s
    training_s = plan.trainer.train_s + plan.trainer.train_s_per_token * tokens
    training_s += plan.trainer.sync_s if plan.trainer.sync_holds_trainer else 0.0
    return rollouts / load.group_size / max(generating_s, training_s)


def simulate(plan: SimulationPlan, *, keep_journal: bool = False) -> SimulatedRun:
    """Run a plan in virtual time. Raises what a run would, and `Deadlock`."""

    async def main() -> SimulatedRun:
        return await Simulation(plan, keep_journal=keep_journal).run()

    return run_in_virtual_time(main())


class Simulation:
    """The parts of one simulated run. Make it on a running event loop in virtual time, and run it once."""

    def __init__(
        self,
        plan: SimulationPlan,
        *,
        disturbance: Disturbance | None = None,
        skips: Iterable[int] = (),
        hiccup: Hiccup = lambda step: 0.0,
        restart_s: float = 60.0,
        tasks: int | None = None,
        start: Checkpoint = Checkpoint(),  # noqa: B008  (frozen)
        watch: bool = True,
        keep_journal: bool = False,
        make_fleet: Callable[[LengthSource], ModelledFleet] | None = None,
    ) -> None:
        """`tasks` are handed out once each, and end the run where its steps don't; None: more than enough.

        `make_fleet` makes another fleet than that of the plan. `start` is where an earlier run stopped; `plan.steps`
        counts from its beginning.
        `watch` draws the timeline: with its timer a deadlock is not detected.
        """
        self.plan = plan
        self._clock = asyncio.get_running_loop().time
        lengths = LengthSource(plan.load.lengths, seed=plan.seed)
        self._length_mean = lengths.mean
        self.fleet = make_fleet(lengths) if make_fleet else _fleet(plan, lengths, restart_s)
        self._generate = MeteredGenerate(self.fleet.router.generate, lengths)
        holding = HoldingGenerate(self._generate, self.fleet.router.interrupt)
        self.observer = SimulationObserver(
            self._generate, warmup_steps=plan.warmup_steps, on_step=self._step_ended, keep_journal=keep_journal
        )
        self.trainer = ModelledTrainer(
            plan.trainer,
            max_staleness=plan.max_staleness,
            publish=self._publish,
            on_step=self._step_trained,
            step=start.step,
            version=start.version,
            skips=frozenset(skips).__contains__,
            hiccup=hiccup,
        )
        spec = modelled_environment(plan.load, seed=plan.seed, tasks=tasks or _ENOUGH_TASKS, disturbance=disturbance)
        self._tasks = TaskStream([TaskSource(spec)], seed=plan.seed, max_epochs=None if tasks is None else 1)
        self.scheduler = StreamScheduler(
            self._tasks,
            _rollouter(plan, spec, holding),
            self.trainer.send,
            self.observer,
            SchedulerSetup(
                settings=plan.scheduling,
                max_staleness=plan.max_staleness,
                max_running=plan.max_running,
                group_sizes={ENVIRONMENT: plan.load.group_size},
                save_state=self._save_state,
            ),
            holder=holding,
        )
        self.scheduler.start(
            step=start.step,
            version=start.version,
            serving_version=start.version,
            state=start.scheduler_state,
            resumes=start.resumes,
        )
        self._resumes = start.resumes
        self._states: dict[int, bytes] = {}
        """Of the scheduler, at steps whose batch was sent."""
        self.checkpoints = {start.step: start}
        """After each step."""
        self.requests_left = 0
        """Requests that engines still held once every rollout had ended."""
        self._publishing: asyncio.TaskGroup | None = None
        self._scheduling: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._warm = Totals()
        self._watches = watch
        self._timeline: list[Moment] = []

    @property
    def open_tasks(self) -> int:
        """Tasks that were handed out and have not ended."""
        return self._tasks.environments[ENVIRONMENT].in_flight

    async def run(self) -> SimulatedRun:
        """Until the last step ended or the last task was trained. Raises what ends the run earlier.

        The ledger balances in any case, and every task that was started here has ended.
        """
        work = asyncio.create_task(self._work(), name="cluster")
        ended = asyncio.create_task(self._ended.wait(), name="last step")
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                failure = work.exception()
                assert failure is not None  # it has no other end
                raise next(leaves_of(failure)) if isinstance(failure, Exception) else failure
            totals = self._totals()
        finally:
            await cancelled(ended)
            if self._scheduling is not None:
                await cancelled(self._scheduling)
            self.requests_left = self.fleet.running + self.fleet.waiting
            await cancelled(work)
            self.scheduler.finish(RUN_ENDED)
        return self._result(totals)

    async def _work(self) -> None:
        """Run every part until cancelled; sets `_ended` when the scheduler is through, and any failure ends all."""
        async with asyncio.TaskGroup() as tasks:
            self._publishing = tasks
            tasks.create_task(self.fleet.run(), name="fleet")
            await asyncio.sleep(0)
            await self.fleet.load(self.trainer.version)
            tasks.create_task(self.trainer.run(), name="trainer")
            if self._watches:
                tasks.create_task(self._watch(), name="timeline")
            self._scheduling = tasks.create_task(self.scheduler.run(), name="scheduler")
            await asyncio.wait({self._scheduling})
            if not self._scheduling.cancelled() and self._scheduling.exception() is None:
                self._ended.set()

    async def _publish(self, version: int) -> None:
        assert self._publishing is not None
        self._publishing.create_task(self._load(version), name=f"weights of version {version}")
        await asyncio.sleep(0)

    async def _load(self, version: int) -> None:
        self.scheduler.weights_installed(await self.fleet.load(version))

    async def _save_state(self, step: int, state: bytes) -> None:
        self._states[step] = state

    def _step_trained(self, event: StepEnded) -> None:
        self.checkpoints[event.step] = Checkpoint(
            event.step, event.version, self._states.pop(event.step), resumes=self._resumes + 1
        )
        self.scheduler.handle(event)

    def _step_ended(self, event: StepEnded) -> None:
        """A step ended, and so has every rollout in it."""
        if event.step == self.plan.warmup_steps:
            self._warm = self._totals()
        if event.step >= self.plan.steps:
            self._ended.set()

    async def _watch(self) -> None:
        """Draw the timeline, at intervals that double as it grows."""
        every_s = 1.0
        while True:
            self._timeline.append(Moment(self._clock(), self.fleet.running, self.trainer.is_training))
            if len(self._timeline) >= 2 * _SAMPLES:
                del self._timeline[1::2]
                every_s *= 2
            await asyncio.sleep(every_s)

    def _totals(self) -> Totals:
        return replace(
            self._generate.totals,
            time_s=self._clock(),
            sampled_tokens=self.fleet.sampled_tokens,
            open_tokens=self._generate.open_tokens.total() + self.fleet.open_tokens,
            trainer_idle_s=self.trainer.idle_s,
        )

    def _result(self, totals: Totals) -> SimulatedRun:
        measured = totals.since(self._warm)
        begun = next((each for each in (measured, totals) if each.asked_completions), None)
        length = self._length_mean if begun is None else begun.asked_tokens / begun.asked_completions
        per_rollout = self.plan.load.turns * length
        trained = max(1, measured.trained_rollouts)
        return SimulatedRun(
            plan=self.plan,
            duration_s=totals.time_s,
            measured=measured,
            length_mean=self._length_mean,
            length_ratio=measured.trained_tokens / trained / per_rollout,
            loss_length_ratio=measured.loss_tokens / trained / per_rollout,
            staleness=dict(sorted(self.observer.staleness.items())),
            waited_s=self.scheduler.statistics.waited_s,
            outcomes=dict(sorted(self.observer.outcomes.items())),
            timeline=self._timeline,
            journal=self.observer.journal,
        )


def _rollouter(plan: SimulationPlan, spec: EnvironmentSpec, generate: HoldingGenerate) -> Rollouter:
    load = plan.load
    rollouts = RolloutSettings(
        group_size=load.group_size,
        max_tokens=load.max_tokens,
        max_turns=load.turns,
        timeout_s=load.timeout_s,
        workers=0,
    )
    environments = {spec.name: LoadedEnvironment.of(spec, rollouts)}
    return Rollouter(rollouts, environments, renderer=ModelledRenderer(load.prompt_tokens), generate=generate)


def _fleet(plan: SimulationPlan, lengths: LengthSource, restart_s: float) -> ModelledFleet:
    return ModelledFleet(plan.engines, plan.trainer, lengths, max_staleness=plan.max_staleness, restart_s=restart_s)
