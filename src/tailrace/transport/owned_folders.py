"""Folders that a run or a process of it owns: for shared memory, for payloads elsewhere, for sockets.

They are removed when their owner ends. Each holds a file that its owner keeps locked, and the kernel releases the lock
of a process that dies, however it died: so the next run tells leftovers of the dead from folders in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from tailrace.errors import SettingsError
from tailrace.transport.channels import create_socket_folder, runtime_folder

_PREFIX = "tailrace-run-"
_LOCK_NAME = "owner.lock"


class OwnedFolder:
    """A fresh folder, locked, and only then given the name of a possible leftover. A context manager removes it."""

    def __init__(self, fresh: Path, epoch: str) -> None:
        """Raises `OSError`."""
        self._lock: int | None = os.open(fresh / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        name = f"{_PREFIX}{os.getpid()}-{epoch[:8]}-{fresh.name.rpartition('-')[2]}"
        self.path = fresh.rename(fresh.with_name(name))

    def remove(self) -> None:
        """Remove the folder and all in it. Removing twice does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def node_memory(epoch: str, host: str) -> Path:
    """Shared memory of a run on one node of a cluster, which knows it by this address: a `NodeFolder`."""
    return shared_memory_folder() / f"{_PREFIX}{epoch[:16]}-{host}"


class NodeFolder:
    """`node_memory`, which processes of the run own together: the last one to leave removes it."""

    def __init__(self, epoch: str, host: str) -> None:
        """Raises `SettingsError` where none can be made."""
        self.path = node_memory(epoch, host)
        try:
            self._lock: int | None = _share(self.path)
        except OSError as error:
            raise SettingsError(f"no folder for weights can be made at {self.path}: {error.strerror}") from error

    def leave(self) -> None:
        """Remove it unless others have it still. Leaving twice does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            if _is_abandoned(self.path):
                shutil.rmtree(self.path, ignore_errors=True)


def _share(folder: Path) -> int:
    """A lock on the folder beside those of others, which is there as long as anybody has one."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(lock), (folder / _LOCK_NAME).stat()):
                return lock
        except FileNotFoundError:  # the last of the others removes it just now
            continue
        os.close(lock)


def own_socket_folder(epoch: str) -> OwnedFolder:
    """For the sockets of processes that meet on this machine: see `transport.channels.ipc_address`."""
    return OwnedFolder(create_socket_folder(), epoch)


def own_shared_memory(epoch: str, parent: Path | None = None) -> OwnedFolder:
    """A folder of shared memory. Raises `SettingsError` where none can be made."""
    return _own(parent or shared_memory_folder(), epoch, "shared memory can be made in {}")


def own_payload_folder(epoch: str, parent: Path) -> OwnedFolder:
    """A folder for payloads that shared memory does not hold. Raises `SettingsError` where none can be made."""
    return _own(parent, epoch, "payloads can be made in {} (transport.payload_folder)", make_parent=True)


def _own(parent: Path, epoch: str, purpose: str, *, make_parent: bool = False) -> OwnedFolder:
    try:
        if make_parent:
            parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="tailrace-", dir=parent))
        return OwnedFolder(parent / made.name, epoch)  # which is absolute from Python 3.12 on, whatever `parent` is
    except OSError as error:
        raise SettingsError(f"no folder for {purpose.format(parent)}: {error.strerror}") from error


def shared_memory_folder() -> Path:
    """Where shared memory is a file system: /dev/shm, and the folder of temporary files on systems without it."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def remove_leftovers(*parents: Path) -> list[Path]:
    """Remove what dead runs of this user left in these folders (by default in those that runs use); returns it."""
    removed = []
    for parent in parents or (runtime_folder(), shared_memory_folder()):
        for folder in parent.glob(f"{_PREFIX}*"):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    """Whether its owner, of this user, is dead. A folder without a lock is left alone."""
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)
