"""A trainer outside with a will of its own, as a process: `wilful_trainer.py RUN WEIGHTS STEPS SAMPLES RANKS SEED STEP
LIFE`.

Its ranks are threads. Each step takes up to a fifth more or fewer samples than was configured; where its seed is even,
its first life dies without a word in the middle of a step, with samples in hand, and the next one goes on from the
checkpoint before.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tailrace
from tailrace.feed import Feed, StreamedSample

QUICKSTART = Path(tailrace.__file__).parent / "recipes" / "models" / "quickstart"
DIED = 17
"""Exit status of a life that was cut short."""


class Ranks:
    """The feeds of all ranks, each used by one thread; the first one, of this thread, leads."""

    def __init__(self, run: str, count: int, step: int) -> None:
        self.leader = Feed(run, step=step, version=step)
        self._threads = [ThreadPoolExecutor(1) for _ in range(1, count)]
        joining = [thread.submit(Feed, run, rank=rank) for rank, thread in enumerate(self._threads, 1)]
        self._others = [joined.result() for joined in joining]

    def pull(self, count: int) -> list[StreamedSample]:
        """So many, shared out evenly."""
        ranks = len(self._others) + 1
        first, *shares = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
        pulling = [
            thread.submit(feed.pull, share)
            for thread, feed, share in zip(self._threads, self._others, shares, strict=True)
        ]
        return [*self.leader.pull(first), *(one for pulled in pulling for one in pulled.result())]

    def end(self) -> None:
        """The terminal record, once the other ranks have left."""
        leaving = [thread.submit(leave, feed) for thread, feed in zip(self._threads, self._others, strict=True)]
        for left in leaving:
            left.result()
        leave(self.leader)


def leave(feed: Feed) -> None:
    with feed:
        pass


def tell(leader: Feed, samples: Sequence[StreamedSample], weights: Path, step: int) -> None:
    """Of a step, in a line of JSON here too."""
    folder = weights / f"{step}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(QUICKSTART, folder)
    leader.step_done(step, samples, weights=folder)
    leader.checkpoint_saved(step, folder)
    print(json.dumps({"step": step, "samples": [one.sample_id for one in samples]}), flush=True)


def main() -> None:
    run, weights, *numbers = sys.argv[1:]
    steps, size, count, seed, step, life = map(int, numbers)
    draw = random.Random(seed * 10 + life)
    last_step = draw.randint(step + 1, steps) if life == 0 and seed % 2 == 0 else None
    ranks = Ranks(run, count, step)
    while step < steps:
        step += 1
        samples = ranks.pull(max(count, round(size * draw.uniform(0.8, 1.2))))
        if step == last_step:
            os._exit(DIED)
        tell(ranks.leader, samples, Path(weights), step)
    ranks.end()


if __name__ == "__main__":
    main()
