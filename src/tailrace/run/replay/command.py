"""`tailrace replay`: from a capture, or from nothing, to a table."""

from __future__ import annotations

import asyncio
import re
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrace.config import RunSettings
from tailrace.errors import DataError, SettingsError
from tailrace.lifecycle.resources import RunResources, remove_leftovers
from tailrace.observability.capture import SETTINGS_FILE, read_capture
from tailrace.observability.phases import PhaseRecorder
from tailrace.records import Group, OpenPayload, PayloadRef
from tailrace.run.replay.measuring import Replay, StageCost
from tailrace.run.replay.scoring import Rescoring
from tailrace.run.replay.stages import Pipeline
from tailrace.run.replay.synthetic import SyntheticLoad, synthetic_groups
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.transport.batch_channels import shared_memory_receiver, shared_memory_sender

_SIZE = re.compile(r"(?P<number>[\d.]+)\s*(?P<unit>B|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_QUEUE = "replay"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to replay, and how."""

    groups: Sequence[Group]
    settings: RunSettings | None
    """Of the run that was captured; None for made-up groups."""
    payload_bytes: int
    open_payload: OpenPayload | None

    @property
    def scheduling(self) -> SchedulingSettings:
        """As the run formed its batches; made-up groups come in rows that hold a rollout each."""
        if self.settings is not None:
            return self.settings.scheduling
        longest = max(rollout.num_tokens for group in self.groups for rollout in group.rollouts)
        return SchedulingSettings(row_tokens=max(16, longest))


async def replay(
    plan: ReplayPlan, *, only: str | None = None, traffic: int = 0, repeat: int = 1, ranks: int = 1
) -> list[StageCost]:
    """Measure the pipeline, for a trainer of so many data-parallel ranks.

    Raises `SettingsError` for a phase that there is not, with those that there are.
    """
    await asyncio.to_thread(remove_leftovers)
    async with AsyncExitStack() as stack:
        resources = stack.enter_context(RunResources(uuid.uuid4().hex))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-replay-")))
        recorder = stack.enter_context(PhaseRecorder().recording())
        address, shared_memory = resources.address(_QUEUE), resources.shared_memory
        sender = shared_memory_sender(address, shared_memory, num_ranks=ranks)
        stack.push_async_callback(sender.close)
        receivers = [
            shared_memory_receiver(address, shared_memory, rank=rank, num_ranks=ranks) for rank in range(ranks)
        ]
        for receiver in receivers:
            stack.push_async_callback(receiver.close)
        scoring = await stack.enter_async_context(Rescoring(plan.settings)) if plan.settings is not None else None
        pipeline = Pipeline(
            plan.groups,
            plan.scheduling,
            sender,
            receivers,
            folder,
            score_groups=scoring.score if scoring is not None and scoring.is_possible else None,
            open_payload=plan.open_payload,
        )
        if only is not None and only not in pipeline.stages:
            raise SettingsError(f"--phase is {only!r}; this replay has: {', '.join(pipeline.stages)}")
        measuring = Replay(pipeline, recorder, payload_bytes=plan.payload_bytes, traffic=traffic, repeat=repeat)
        return await asyncio.create_task(measuring.measure(only))


def captured(folder: Path) -> ReplayPlan:
    """What a run captured: its folder, or the `capture` folder in it. Raises `DataError`."""
    inner = folder / "capture"
    place = inner if inner.is_dir() else folder
    groups = read_capture(place)
    settings = place / SETTINGS_FILE
    if not settings.is_file():
        raise DataError(f"{settings} is missing: it tells how the run formed its batches")
    experts = _StandIns()
    return ReplayPlan(
        groups,
        RunSettings.model_validate_json(settings.read_text(encoding="utf-8")),
        _num_bytes(groups),
        experts.open,
    )


def made_up(shape: str, routed_experts: str = "0B") -> ReplayPlan:
    """Groups of `ROLLOUTSxTURNS`, of 2,032 tokens a turn. Raises `SettingsError`."""
    rollouts, _, turns = shape.lower().partition("x")
    if not (rollouts.isdecimal() and turns.isdecimal() and int(rollouts) and int(turns)):
        raise SettingsError(f"--synthetic is {shape!r}; it is rollouts x turns, such as 64x20")
    experts = _StandIns()
    load = SyntheticLoad(rollouts=int(rollouts), turns=int(turns), experts_bytes=parse_bytes(routed_experts))
    groups = synthetic_groups(load, experts.put)
    return ReplayPlan(groups, None, _num_bytes(groups), experts.open if load.experts_layers else None)


def parse_bytes(text: str) -> int:
    """A size as people write it.

    >>> parse_bytes("1GB"), parse_bytes("1.5 mb"), parse_bytes("512")
    (1000000000, 1500000, 512)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"--routed-experts is {text!r}; a size is written as 1GB, 500MB or 0")
    return int(float(match["number"]) * _UNITS[(match["unit"] or "B").upper()])


def _num_bytes(groups: Sequence[Group]) -> int:
    """Of the token columns, and of the experts that belong to them."""
    branches = [branch for group in groups for rollout in group.rollouts for branch in rollout.branches]
    columns = sum(
        branch.token_ids.nbytes + branch.logprobs.nbytes + branch.policy_versions.nbytes + branch.loss_mask.nbytes
        for branch in branches
    )
    refs = {chunk.ref.uri: chunk.ref for branch in branches for chunk in branch.payload_chunks if chunk.ref is not None}
    return columns + sum(ref.num_bytes for ref in refs.values())


class _StandIns:
    """Routed experts in this process's memory. What a capture only counted is made up when it is first asked for."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def put(self, array: NDArray[np.uint8]) -> PayloadRef:
        """Keep a copy."""
        ref = PayloadRef(f"replay:{len(self._arrays)}", str(array.dtype), array.shape)
        self._arrays[ref.uri] = array.copy()
        return ref

    def open(self, ref: PayloadRef) -> NDArray[np.generic]:
        """See `OpenPayload`."""
        if ref.uri not in self._arrays:
            self._arrays[ref.uri] = np.ones(ref.shape, ref.dtype)
        return self._arrays[ref.uri]
