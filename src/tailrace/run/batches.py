"""Which batch queue a run's settings mean: its two ends, in the orchestrator's process and in the trainer's."""

from __future__ import annotations

from pathlib import Path

from tailrace.config import RunSettings
from tailrace.transport.batches.channels import (
    ChannelBatchReceiver,
    ChannelBatchSender,
    file_receiver,
    file_sender,
    shared_memory_receiver,
    shared_memory_sender,
    value_receiver,
    value_sender,
)

BATCH_QUEUE_CAPACITY = 3
"""More than the scheduler sends ahead, so that it never waits inside `send`."""


def batch_sender(settings: RunSettings, address: str, *, shared_memory: Path, files: Path) -> ChannelBatchSender:
    """The orchestrator's end, for a trainer that is a process of its own. Make it on a running event loop."""
    match settings.transport.batches:
        case "files":
            return file_sender(address, files, capacity=BATCH_QUEUE_CAPACITY)
        case "zmq":
            return value_sender(address, capacity=BATCH_QUEUE_CAPACITY)
        case _:
            return shared_memory_sender(address, shared_memory, spill=files, capacity=BATCH_QUEUE_CAPACITY)


def batch_receiver(settings: RunSettings, address: str, *, shared_memory: Path, files: Path) -> ChannelBatchReceiver:
    """The trainer's end. Make it on a running event loop."""
    match settings.transport.batches:
        case "files":
            return file_receiver(address, files)
        case "zmq":
            return value_receiver(address)
        case _:
            return shared_memory_receiver(address, shared_memory, spill=files)
