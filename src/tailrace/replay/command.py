"""`tailrace replay`: from a capture, or from nothing, to a table."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tailrace.config import RunSettings
from tailrace.errors import DataError, SettingsError, TailraceError
from tailrace.guards import guarded
from tailrace.records import Group
from tailrace.replay.capture import SETTINGS_FILE, capture_folders, read_capture
from tailrace.replay.experts import ReplayedExperts, num_bytes
from tailrace.replay.measuring import Replay, StageCost
from tailrace.replay.scoring import ScoreAgain, environments_of, rescoring
from tailrace.replay.stages import Pipeline
from tailrace.replay.synthetic import SyntheticLoad, synthetic_groups
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.tracing.phases import PhaseRecorder
from tailrace.transport.batches.channels import ChannelBatchReceiver, ChannelBatchSender
from tailrace.transport.batches.stores import FileSource, SharedMemoryStore
from tailrace.transport.channels import ipc_address
from tailrace.transport.owned_folders import own_shared_memory, own_socket_folder, remove_leftovers

_logger = logging.getLogger(__name__)

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>B|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_QUEUE = "replay"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to replay: the groups that a run captured, or a made-up load."""

    captured: Sequence[Group] = ()
    settings: RunSettings | None = None
    """Of the run that was captured."""
    load: SyntheticLoad | None = None

    def groups(self, experts: ReplayedExperts) -> Sequence[Group]:
        """What enters the pipeline, its routed experts in the store."""
        if self.load is not None:
            return synthetic_groups(self.load, experts.put)
        experts.stand_in(self.captured)
        return self.captured

    def scheduling(self, groups: Sequence[Group]) -> SchedulingSettings:
        """As the run formed its batches; rows of made-up groups hold a rollout each."""
        if self.settings is not None:
            return self.settings.scheduling
        longest = max(rollout.num_tokens for group in groups for rollout in group.rollouts)
        return SchedulingSettings(row_tokens=max(16, longest))


async def replay(plan: ReplayPlan, *, only: str | None = None, traffic: int = 0, repeat: int = 1) -> list[StageCost]:
    """Measure the pipeline, for a trainer of one rank. Raises `SettingsError` for an unknown phase."""
    await asyncio.to_thread(remove_leftovers)
    async with AsyncExitStack() as stack:
        epoch = uuid.uuid4().hex
        shared_memory = stack.enter_context(own_shared_memory(epoch)).path
        address = ipc_address(stack.enter_context(own_socket_folder(epoch)).path, _QUEUE)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-replay-")))
        recorder = stack.enter_context(PhaseRecorder().recording())
        sender = ChannelBatchSender(address, SharedMemoryStore(shared_memory))
        stack.push_async_callback(sender.close)
        receiver = ChannelBatchReceiver(address, FileSource(shared_memory, recycled=True))
        stack.push_async_callback(receiver.close)
        experts = stack.enter_context(ReplayedExperts(shared_memory))
        groups = await asyncio.to_thread(plan.groups, experts)
        score, why_not = await _scored_again(plan.settings, stack)
        pipeline = Pipeline(
            groups,
            plan.scheduling(groups),
            sender,
            [receiver],
            folder,
            score_groups=score,
            open_payload=experts.open if experts else None,
        )
        if only is not None and only not in pipeline.stages:
            raise SettingsError(f"--phase is {only!r}; this replay has: {', '.join(pipeline.stages)}{why_not}")
        measuring = Replay(pipeline, recorder, payload_bytes=num_bytes(groups), traffic=traffic, repeat=repeat)
        return await asyncio.create_task(measuring.measure(only))


async def _scored_again(settings: RunSettings | None, stack: AsyncExitStack) -> tuple[ScoreAgain | None, str]:
    """What scores captured rollouts again, until `stack` is left; and why nothing does, where it should."""
    if settings is None:
        return None, ""
    try:
        loaded = await asyncio.to_thread(environments_of, settings)
    except TailraceError as error:  # the capture may have come here without its environments
        _logger.warning("score is left out: %s", error)
        return None, f"; score is left out: {error}"
    return await stack.enter_async_context(rescoring(settings, loaded)), ""


def captured(folder: Path) -> ReplayPlan:
    """What a run captured: its folder, for the newest capture, or a `capture` folder in it. Raises `DataError`."""
    place = [folder, *capture_folders(folder / "capture")][-1]
    groups = read_capture(place)
    settings = place / SETTINGS_FILE
    if not settings.is_file():
        raise DataError(f"{settings} is missing: it says how the run formed its batches")
    with guarded(f"{settings} holds no settings of a run", DataError):
        return ReplayPlan(groups, RunSettings.model_validate_json(settings.read_bytes()))


def run_of(capture: Path) -> Path:
    """The folder of the run that is named, or whose capture is."""
    return capture.resolve().parent if (capture / SETTINGS_FILE).is_file() else capture


def made_up(shape: str, routed_experts: str = "0B") -> ReplayPlan:
    """Groups of `ROLLOUTSxTURNS`, of 2,032 tokens a turn. Raises `SettingsError`."""
    rollouts, _, turns = shape.lower().partition("x")
    if not (rollouts.isdecimal() and turns.isdecimal() and int(rollouts) and int(turns)):
        raise SettingsError(f"--synthetic is {shape!r}; it is rollouts x turns, such as 64x20")
    return ReplayPlan(load=SyntheticLoad(int(rollouts), int(turns), experts_bytes=parse_bytes(routed_experts)))


def parse_bytes(text: str) -> int:
    """A size as people write it.

    >>> parse_bytes("1GB"), parse_bytes("1.5 mb"), parse_bytes("512")
    (1000000000, 1500000, 512)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"--routed-experts is {text!r}; a size is written as 1GB, 500MB or 0")
    return int(float(match["number"]) * _UNITS[(match["unit"] or "B").upper()])
