"""Each role's end of the run's payload store."""

from __future__ import annotations

from pathlib import Path

from tailrace.config import RunSettings
from tailrace.transport.payloads.slab_store import FOLDER, OverflowingPayloadStore, SlabPayloadStore
from tailrace.transport.payloads.store import PayloadStore

ORCHESTRATOR = "orchestrator"
"""Name under which it puts what came over sockets; a generator's is that of its socket, another one each life."""


def payload_parent(settings: RunSettings, run_folder: Path) -> Path | None:
    """Where the run's folder for payloads belongs that find no room in shared memory; None without payloads."""
    if not settings.generator.return_routed_experts:
        return None
    return Path(settings.transport.payload_folder or run_folder)


def open_payload_store(settings: RunSettings, shared_memory: Path, folder: Path, *, writer: str = "") -> PayloadStore:
    """One process's end: shared memory until it is full, or the folder that the settings name. Puts as `writer`."""
    in_folder = SlabPayloadStore(folder, writer=writer, name=FOLDER)
    if settings.transport.payload_folder is not None:
        return in_folder
    return OverflowingPayloadStore(SlabPayloadStore(shared_memory, writer=writer), in_folder)
