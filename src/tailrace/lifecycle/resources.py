"""What a run owns for as long as it runs: a folder of sockets, one of shared memory, and one for payloads elsewhere.

They are removed when the run ends. Each holds a file that its owner keeps locked, and the kernel lets go of the lock of
a process that dies, however it died: so the next run knows leftovers of dead runs from folders in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from tailrace.errors import SettingsError
from tailrace.transport.channels import create_socket_folder, ipc_address, runtime_folder

_PREFIX = "tailrace-run-"
_LOCK_NAME = "owner.lock"


class RunResources:
    """The folders of one run. Remove them with `remove`, or use it as a context manager.

    Raises `SettingsError` when the folder for shared memory cannot be written to.
    """

    def __init__(
        self, epoch: str, *, shared_memory_parent: Path | None = None, payload_parent: Path | None = None
    ) -> None:
        self._locks: list[int] = []
        label = f"{os.getpid()}-{epoch[:8]}"
        parent = shared_memory_parent or shared_memory_folder()
        try:
            self.shared_memory = self._own(Path(tempfile.mkdtemp(prefix="tailrace-", dir=parent)), label)
        except OSError as error:
            raise SettingsError(f"no folder for shared memory can be made in {parent}: {error.strerror}") from error
        self.sockets = self._own(create_socket_folder(), label)
        self.payloads = self.shared_memory
        if payload_parent is not None:
            self.payloads = self._payload_folder(payload_parent, label)

    def address(self, name: str) -> str:
        """The address of this run's socket `name`."""
        return ipc_address(self.sockets, name)

    def remove(self) -> None:
        """Remove the folders and all in them. Removing twice does nothing."""
        for folder in {self.sockets, self.shared_memory, self.payloads}:
            shutil.rmtree(folder, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())

    def __enter__(self) -> RunResources:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def _payload_folder(self, parent: Path, label: str) -> Path:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            return self._own(Path(tempfile.mkdtemp(prefix="tailrace-", dir=parent)), label)
        except OSError as error:
            self.remove()
            raise SettingsError(
                f"no folder for payloads can be made in {parent} (transport.payload_folder): {error.strerror}"
            ) from error

    def _own(self, folder: Path, label: str) -> Path:
        """Lock the folder, and only then give it the name by which it could be taken for a leftover."""
        lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._locks.append(lock)
        return folder.rename(folder.with_name(f"{_PREFIX}{label}-{folder.name.rpartition('-')[2]}"))


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
