"""What a run owns for as long as it runs: a folder of shared memory, one for payloads elsewhere, one of sockets.

They are removed when the run ends. Each holds a file that its owner keeps locked, and the kernel lets go of the lock of
a process that dies, however it died: so the next run knows leftovers of dead runs from folders in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tailrace.errors import SettingsError
from tailrace.transport.channels import create_socket_folder, ipc_address, runtime_folder

_PREFIX = "tailrace-run-"
_LOCK_NAME = "owner.lock"


class OwnedFolder:
    """A fresh folder, taken over: locked, and only then given the name by which it could be taken for a leftover."""

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


class SocketFolder(OwnedFolder):
    """One for the sockets of processes that meet on this machine. Use it as a context manager."""

    def __init__(self, epoch: str) -> None:
        super().__init__(create_socket_folder(), epoch)

    def address(self, name: str) -> str:
        """Of the socket `name`. Raises `SettingsError` when its path is too long for a socket."""
        return ipc_address(self.path, name)

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class RunResources:
    """The folders of one run for bytes. Remove them with `remove`, or use it as a context manager.

    Raises `SettingsError` when the folder for shared memory cannot be written to.
    """

    def __init__(
        self, epoch: str, *, shared_memory_parent: Path | None = None, payload_parent: Path | None = None
    ) -> None:
        parent = shared_memory_parent or shared_memory_folder()
        try:
            shared_memory = OwnedFolder(Path(tempfile.mkdtemp(prefix="tailrace-", dir=parent)), epoch)
        except OSError as error:
            raise SettingsError(f"no folder for shared memory can be made in {parent}: {error.strerror}") from error
        self._folders = [shared_memory]
        self.shared_memory = self.payloads = shared_memory.path
        if payload_parent is not None:
            self.payloads = self._payload_folder(payload_parent, epoch)

    def remove(self) -> None:
        """Remove the folders and all in them. Removing twice does nothing."""
        for folder in self._folders:
            folder.remove()

    def __enter__(self) -> RunResources:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _payload_folder(self, parent: Path, epoch: str) -> Path:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._folders.append(OwnedFolder(Path(tempfile.mkdtemp(prefix="tailrace-", dir=parent)), epoch))
        except OSError as error:
            self.remove()
            raise SettingsError(
                f"no folder for payloads can be made in {parent} (transport.payload_folder): {error.strerror}"
            ) from error
        return self._folders[-1].path


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
    """Whether its owner, of this user, lives no more. A folder without a lock is left alone."""
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
