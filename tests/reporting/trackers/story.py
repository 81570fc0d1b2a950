"""What a short run tells its trackers, and a run of the real hub over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tailrace.records import RunStatus
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.settings import ObservabilitySettings
from tailrace.reporting.sinks import JsonlSink
from tailrace.reporting.summary import RunSummary
from tailrace.reporting.trackers.hub import Trackers, open_trackers
from tailrace.tracing.background import BackgroundWriter
from tests.reporting.example_run import a_message, a_rollout

LINES = [
    {"step": 1, "wall_s": 1.5, "reward/mean": 0.25, "training/loss": -0.125, "policy/version": 1.0},
    {"step": 2, "wall_s": 3.0, "reward/mean": 0.5, "training/loss": 0.0625, "policy/version": 2.0},
    {"step": 1, "wall_s": 3.25, "eval/sort/reward/mean": 0.75},
    {"step": 3, "wall_s": 4.5, "reward/mean": 0.625, "training/loss": 1e-9, "policy/version": 3.0},
]
SUMMARY = RunSummary(name="story", status=RunStatus.FINISHED, steps=3, reward_last=0.625, environments=["sort"])
SETTINGS = {"name": "story", "trainer": {"learning_rate": 1e-4}, "environments": [{"name": "sort"}], "max_steps": None}


def entries(step: int) -> list[RolloutEntry]:
    said = "<b>&|\n```\x1b[31m \u202e naïve 名前"
    messages = [a_message("user", f"sort {step}"), a_message("assistant", said)]
    return [a_rollout(step, place, place / 4, messages) for place in range(5)]


def tell(
    folder: Path,
    *trackers: str,
    is_resumed: bool = False,
    close_s: float = 120.0,
    queue_records: int = 256,
    story: Callable[[Trackers, BackgroundWriter], None] | None = None,
) -> Trackers:
    """Run the hub over the story in a run's folder, beside `metrics.jsonl`."""
    chosen = ObservabilitySettings(
        trackers=trackers,
        tracker_rollouts=3,
        tracker_rollouts_every_steps=2,
        tracker_close_s=close_s,
        queue_records=queue_records,
    )
    return asyncio.run(_tell(folder, chosen, is_resumed, story or whole_story(folder)))


def whole_story(folder: Path) -> Callable[[Trackers, BackgroundWriter], None]:
    def tell_it(hub: Trackers, writer: BackgroundWriter) -> None:
        sink = JsonlSink(folder / "metrics.jsonl", writer)
        for line in LINES:
            sink.write(line)
            hub.logged(line)
            if "reward/mean" in line:
                hub.ended(int(line["step"]), entries(int(line["step"])), writer.submit)
        writer.close()
        hub.checkpoint_written(2, str(folder / "checkpoints/step_000002"))
        hub.summarise(SUMMARY)

    return tell_it


async def _tell(
    folder: Path, chosen: ObservabilitySettings, is_resumed: bool, story: Callable[[Trackers, BackgroundWriter], None]
) -> Trackers:
    writer = BackgroundWriter()
    async with open_trackers(chosen, name="story", run_folder=folder, settings=SETTINGS, is_resumed=is_resumed) as hub:
        await asyncio.to_thread(story, hub, writer)
    writer.close()
    return hub
