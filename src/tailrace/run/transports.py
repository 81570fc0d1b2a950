"""What joins the roles of a run: event log, batches, weights, payloads. Here is decided of which kind each is.

Roles in processes of their own meet at the launcher's addresses, and pass bytes in folders that all of them see. Roles
of this very process share objects (`MemoryTransports`), which they find by the run's epoch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tailrace.config import RunSettings
from tailrace.lifecycle.launchers import Launcher
from tailrace.lifecycle.resources import RunResources, remove_leftovers
from tailrace.run.folder import RunPaths
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
from tailrace.transport.batches.queue import BatchReceiver, MemoryBatchQueue
from tailrace.transport.events.log import EventLog, MemoryEventLog
from tailrace.transport.events.rpc import EventLogClient
from tailrace.transport.payloads.slab_store import FOLDER, OverflowingPayloadStore, SlabPayloadStore
from tailrace.transport.payloads.store import MemoryPayloadStore, PayloadStore
from tailrace.transport.weights.stores import (
    MemoryModelStateDictStore,
    ModelStateDictStore,
    SharedMemoryModelStateDictStore,
)

if TYPE_CHECKING:
    from tailrace.run.served_here import ServedHere

_QUEUE_CAPACITY = 3
"""Of batches: more than the scheduler sends ahead, so that it never waits inside `send`."""

ORCHESTRATOR = "orchestrator"
"""Name under which it puts payloads that came over sockets; a generator's is that of its life."""


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a role finds what joins it to the others. Travels in its settings."""

    epoch: str
    events: str = ""
    """Address of the event log."""
    batches: str = ""
    """Address of the batch queue."""
    batch_files: str = ""
    shared_memory: str = ""
    payloads: str = ""
    """Folder for payloads that shared memory has no room for."""
    in_this_process: bool = False

    def payload_store(self, settings: RunSettings, writer: str = "") -> PayloadStore:
        """Shared memory until it is full, or the folder that the settings name. Puts as `writer`."""
        if self.in_this_process:
            return memory_transports(self.epoch).payloads
        in_folder = SlabPayloadStore(Path(self.payloads), writer=writer, name=FOLDER)
        if settings.transport.payload_folder is not None:
            return in_folder
        return OverflowingPayloadStore(SlabPayloadStore(Path(self.shared_memory), writer=writer), in_folder)

    def model_state_dicts(self) -> ModelStateDictStore:
        """Where the trainer leaves weights."""
        if self.in_this_process:
            return memory_transports(self.epoch).model_state_dicts
        return SharedMemoryModelStateDictStore(Path(self.shared_memory))


@dataclass(slots=True)
class MemoryTransports:
    """All of it, as objects of this process; they end with the run, whatever role lets go of them before."""

    log: EventLog
    batches: MemoryBatchQueue = field(default_factory=lambda: MemoryBatchQueue(_QUEUE_CAPACITY))
    model_state_dicts: MemoryModelStateDictStore = field(default_factory=MemoryModelStateDictStore)
    payloads: MemoryPayloadStore = field(default_factory=MemoryPayloadStore)
    generators: dict[str, ServedHere] = field(default_factory=dict)
    """By the addresses that they said they were ready at."""


_of_this_process: dict[str, MemoryTransports] = {}
"""By epoch."""


def memory_transports(epoch: str) -> MemoryTransports:
    """Those of a run whose roles are in this process."""
    return _of_this_process[epoch]


@contextmanager
def open_transports(
    settings: RunSettings, paths: RunPaths, launcher: Launcher, log: EventLog
) -> Iterator[tuple[Whereabouts, AbstractContextManager[None]]]:
    """Where the roles of a run that this launcher starts find each other. What was made for it goes with this."""
    raise NotImplementedError
