"""How full the slots stay on short multi-turn work: 64 sessions of 5 turns of 40 to 80 tokens over 32 slots.

    python benchmarks/occupancy.py [--json] [--quick] [--case simulated-8ms ...]

Occupancy is running requests over min(slots, sessions that have a turn left), per engine step, until the first session
has nothing left. The generator is the real one, with its thread and event loop; `simulated` engines do nothing but wait
for the time of a step, `torch` is the torch engine over a small model. `think_s` is what a session's agent takes
between two turns. The ideal loses nothing; `burst-16` is what is lost by filling slots only once in 16 steps.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from small_model import ModelSize, make_model

from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import Engine, SampledTokens
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import GenerationRequest, SamplingParams

SLOTS, SESSIONS, TURNS = 32, 64, 5
TOKENS = (40, 80)
TARGET_OCCUPANCY = 0.95


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    occupancy: float
    ideal: float
    steps: int
    think_s: float
    target: float | None
    met: bool | None


class Counted:
    """An engine whose running requests are counted in every step."""

    def __init__(self, engine: Engine, sessions_left: Callable[[], int]):
        self._engine, self._sessions_left = engine, sessions_left
        self.running, self.possible = 0, 0
        self.steps = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self) -> list[SampledTokens]:
        chunks = self._engine.step()
        if self._sessions_left() == SESSIONS:
            ended = sum(chunk.finish_reason is not None for chunk in chunks)
            self.running += self._engine.statistics().running + ended
            self.possible += min(SLOTS, SESSIONS)
            self.steps += 1
        return chunks


class BurstEngine(SimulatedEngine):
    """Fills its slots only once in 16 steps."""

    def _place_waiting(self) -> None:
        if self.statistics().steps_total % 16 == 0:
            super()._place_waiting()


def small_torch_engine() -> TorchEngine:
    torch.set_num_threads(1)
    return TorchEngine(make_model(ModelSize()), slots=SLOTS, max_model_tokens=1024)


Case: TypeAlias = "tuple[Callable[[], Engine], float, float | None]"

CASES: dict[str, Case] = {
    "simulated-8ms": (lambda: SimulatedEngine(slots=SLOTS, step_s=0.008), 0.0, TARGET_OCCUPANCY),
    "simulated-8ms-thinking": (lambda: SimulatedEngine(slots=SLOTS, step_s=0.008), 0.05, TARGET_OCCUPANCY),
    "torch": (small_torch_engine, 0.0, TARGET_OCCUPANCY),
    "burst-16": (lambda: BurstEngine(slots=SLOTS, step_s=0.002), 0.0, None),
}
"""Engine, seconds between turns, target."""


async def run_case(name: str) -> Row:
    build, think_s, target = CASES[name]
    left = SESSIONS
    engines: list[Counted] = []

    def factory() -> Engine:
        engines.append(Counted(build(), lambda: left))
        return engines[0]  # type: ignore[return-value]

    async def session(index: int) -> None:
        nonlocal left
        lengths, context = random.Random(index), np.arange(1, 9, dtype=np.int32)
        for turn in range(TURNS):
            completion = await generator.generate(
                GenerationRequest(
                    request_id=f"{index}/{turn}",
                    session_id=f"{index}",
                    group_id=f"{index}",
                    prompt_token_ids=context,
                    sampling=SamplingParams(max_tokens=lengths.randint(*TOKENS)),
                )
            )
            context = np.concatenate([context, completion.token_ids, np.asarray([7, 8, 9], np.int32)])
            await asyncio.sleep(think_s)
        left -= 1

    async with Generator(factory) as generator:
        await asyncio.gather(*(session(index) for index in range(SESSIONS)))
    counted = engines[0]
    occupancy = counted.running / counted.possible
    return Row(
        case=name,
        occupancy=occupancy,
        ideal=1.0,
        steps=counted.steps,
        think_s=think_s,
        target=target,
        met=None if target is None else occupancy >= target,
    )


def main() -> None:
    options = kit.parse_options(__doc__)
    names = [name for name in CASES if not options.quick or name != "torch"]
    rows = []
    for name in options.choose(names):
        rows.append(asyncio.run(run_case(name)))
        kit.progress(f"{name}: {rows[-1].occupancy:.1%}")
    kit.report("Slots taken on short multi-turn work", rows, options)


if __name__ == "__main__":
    main()
