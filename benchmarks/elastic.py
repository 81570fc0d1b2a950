"""Tokens per second as generators join and leave a run, against those of engines that are always full.

    python benchmarks/elastic.py [--json] [--quick] [--case up-and-down ...] [--timeline]

The generators, pool, router, scheduler and ledger of a run, over modelled engines and a modelled trainer in virtual
time: nothing depends on the machine. A replica has 64 slots, and a step takes 15 ms + 0.3 ms per running request; it
needs 20 us to read a token again. A batch is 64 groups of 8, a step of the trainer takes 5 s, and a replica loads
weights in 2 s, beside what it generates. Between 2 and 16 replicas:

    fixed          8 all the time: what is lost without any change
    up-and-down    2 to 16 and back, two more or less every 90 s
    by-notice      8, of which one leaves in order every 60 s, while another joins
    killed         the same, without a notice
    ten            ten times one joins 4 others and leaves again

`area_lost` is the share of tokens that were not sampled, or were sampled twice since a replica died, of what replicas
with every slot taken sample from the moment that their engine is built until they are gone. `follows_s` is the longest
time from a change until five seconds were within a twentieth of that rate, and `redone_tokens` are those that were
sampled twice. With `--timeline` the rows are the course of each case, in steps of half a minute.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.elastic_fleet import ElasticFleet, elastic, elastic_settings

from tailrace.simulation.run import Simulation
from tailrace.simulation.settings import SimulationPlan
from tailrace.simulation.virtual_time import run_in_virtual_time

TARGET = 0.05
FOLLOWS_TARGET_S = 30.0
WARMUP_S = 180.0
LEAST, MOST = 2, 16
WINDOW_S, NEAR = 5, 0.95
STEP_S = 30

Script = Callable[[ElasticFleet, bool], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    seconds: float
    joins: int
    leaves: int
    losses: int
    tokens_per_s: float
    ideal_tokens_per_s: float
    area_lost: float
    follows_s: float
    redone_tokens: int
    staleness_max: int
    target: float
    met: bool


@dataclass(frozen=True)
class Moment:
    """Half a minute of one case."""

    case: str
    seconds: int
    replicas: int
    """At its end."""
    tokens_per_s: float
    ideal_tokens_per_s: float


@dataclass
class Course:
    """What was sampled, second by second."""

    kept: list[int] = field(default_factory=list)
    """Tokens so far, but for those that had to be sampled again."""
    ideal: list[float] = field(default_factory=list)
    """Tokens so far, of engines that are always full."""
    replicas: list[int] = field(default_factory=list)

    def follows_s(self) -> float:
        """The longest time from a change of the number of replicas until the rate is near that of full engines."""
        rates = [self._rate(self.kept, second) for second in range(len(self.kept))]
        ideals = [self._rate(self.ideal, second) for second in range(len(self.kept))]
        longest, since = 0, None
        for second in range(WINDOW_S, len(rates)):
            if self.replicas[second] != self.replicas[second - 1]:
                since = second
            if since is not None and second - since >= WINDOW_S and rates[second] >= NEAR * ideals[second]:
                longest, since = max(longest, second - since), None
        return float(longest if since is None else max(longest, len(rates) - since))

    @staticmethod
    def _rate(tokens: list[int] | list[float], second: int) -> float:
        first = max(0, second - WINDOW_S)
        return (tokens[second] - tokens[first]) / max(1, second - first)


async def fixed(fleet: ElasticFleet, quick: bool) -> None:
    await asyncio.sleep(300 if quick else 1200)


async def up_and_down(fleet: ElasticFleet, quick: bool) -> None:
    pairs, pause_s = (2, 60) if quick else (7, 90)
    for _ in range(pairs):
        fleet.join(), fleet.join()
        await asyncio.sleep(pause_s)
    for _ in range(pairs):
        for name in fleet.serving[-2:]:
            fleet.leave(name)
        await asyncio.sleep(pause_s)


async def by_notice(fleet: ElasticFleet, quick: bool) -> None:
    await _in_turns(fleet, 3 if quick else 20, fleet.leave)


async def killed(fleet: ElasticFleet, quick: bool) -> None:
    await _in_turns(fleet, 3 if quick else 20, fleet.lose)


async def _in_turns(fleet: ElasticFleet, times: int, end: Callable[[str], None]) -> None:
    for number in range(times):
        await asyncio.sleep(60)
        guests = [name for name in fleet.serving if int(name.rpartition("-")[2]) >= LEAST]
        end(guests[number % len(guests)])
        fleet.join()


async def ten(fleet: ElasticFleet, quick: bool) -> None:
    for _ in range(2 if quick else 10):
        name = fleet.join()
        await asyncio.sleep(90)
        fleet.leave(str(name))
        await asyncio.sleep(30)


CASES: dict[str, tuple[Script, int]] = {
    "fixed": (fixed, 8),
    "up-and-down": (up_and_down, 2),
    "by-notice": (by_notice, 8),
    "killed": (killed, 8),
    "ten": (ten, 4),
}
"""What happens, and how many replicas there are before."""


def plan() -> SimulationPlan:
    return SimulationPlan.model_validate(
        {
            "steps": 100_000,
            "warmup_steps": 0,
            "engines": {"replicas": LEAST, "slots": 64},
            "trainer": {"train_s": 5.0, "sync_s": 2.0, "sync_holds_engines": False, "sync_holds_trainer": False},
            "load": {"lengths": {"mean_log": 6.0, "sigma": 0.8, "task_sigma": 0.4, "cap": 4096}, "max_tokens": 4096},
            "scheduling": {"batch_size": 512, "row_tokens": 32_768},
        }
    )


async def play(case: str, quick: bool) -> tuple[Row, Course]:
    script, begins_with = CASES[case]
    chosen = plan()
    simulation = Simulation(
        chosen,
        make_fleet=elastic(elastic_settings(LEAST, MOST, "--generator.slots", "64"), chosen, start_s=20.0),
        watch=False,
    )
    fleet = simulation.fleet
    assert isinstance(fleet, ElasticFleet)
    fleet.generators.follow_slots(simulation.scheduler.resize)
    running = asyncio.ensure_future(simulation.run())
    for _ in range(begins_with - LEAST):
        fleet.join(start_s=0.0)
    await asyncio.sleep(WARMUP_S)
    before = (fleet.generators.joins, fleet.generators.leaves, fleet.generators.losses)
    course, generators = Course(), fleet.generators
    watching = asyncio.create_task(_watch(fleet, course))
    await script(fleet, quick)
    after = (generators.joins, generators.leaves, generators.losses)
    redone = sum(tokens for _, tokens in fleet.redone_tokens)
    watching.cancel()
    running.cancel()
    await asyncio.gather(watching, running, return_exceptions=True)
    return _row(case, course, [new - old for new, old in zip(after, before, strict=True)], redone, simulation), course


async def _watch(fleet: ElasticFleet, course: Course) -> None:
    began_s = asyncio.get_running_loop().time()
    first = _kept(fleet)
    while True:
        now_s = asyncio.get_running_loop().time()
        spans = [*fleet.there, *((since_s, now_s) for since_s in fleet.began_s.values())]
        there_s = sum(max(0.0, until_s - max(since_s, began_s)) for since_s, until_s in spans)
        course.kept.append(_kept(fleet) - first)
        course.ideal.append(there_s * fleet.plan.engines.tokens_per_s / fleet.plan.engines.replicas)
        course.replicas.append(len(fleet.began_s))
        await asyncio.sleep(1.0)


def _kept(fleet: ElasticFleet) -> int:
    return fleet.sampled_tokens - sum(tokens for _, tokens in fleet.redone_tokens)


def _row(case: str, course: Course, changes: list[int], redone: int, simulation: Simulation) -> Row:
    seconds, kept, ideal = float(len(course.kept) - 1), course.kept[-1], course.ideal[-1]
    lost, follows_s = 1 - kept / ideal, course.follows_s()
    joins, leaves, losses = changes
    return Row(
        case=case,
        seconds=seconds,
        joins=joins,
        leaves=leaves,
        losses=losses,
        tokens_per_s=kept / seconds,
        ideal_tokens_per_s=ideal / seconds,
        area_lost=lost,
        follows_s=follows_s,
        redone_tokens=redone,
        staleness_max=max((age for age, tokens in simulation.observer.staleness.items() if tokens), default=0),
        target=TARGET,
        met=lost <= TARGET and follows_s <= FOLLOWS_TARGET_S,
    )


def _moments(case: str, course: Course) -> Iterator[Moment]:
    for second in range(STEP_S, len(course.kept), STEP_S):
        first = second - STEP_S
        yield Moment(
            case=case,
            seconds=second,
            replicas=course.replicas[second],
            tokens_per_s=(course.kept[second] - course.kept[first]) / STEP_S,
            ideal_tokens_per_s=(course.ideal[second] - course.ideal[first]) / STEP_S,
        )


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--timeline", action="store_true", help="the course of each case instead")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    rows: list[Row] = []
    moments: list[Moment] = []
    for case in options.choose(list(CASES)):
        row, course = run_in_virtual_time(play(case, options.quick))
        kit.progress(f"{case}: {row.area_lost:.1%} lost, follows within {row.follows_s:g} s")
        rows.append(row)
        moments += _moments(case, course)
    kit.report("Generators that join and leave", moments if arguments.timeline else rows, options)


if __name__ == "__main__":
    main()
