"""Room for a file, taken before it is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tailrace.errors import NoRoom

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


def reserve_room(file: int, folder: Path, num_bytes: int, *, advice: str) -> None:
    """Have the first `num_bytes` of an open file in `folder` backed: a write through a mapping into a full tmpfs is a
    signal (SIGBUS), no error.

    Raises `NoRoom` with `advice` where the folder has too little, and `OSError` for anything else.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.ftruncate(file, num_bytes)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        stat = os.fstatvfs(file)
        raise NoRoom(
            f"{folder} has no room for {num_bytes:,} bytes ({stat.f_bavail * stat.f_frsize:,} are free); "
            f"enlarge it (docker: --shm-size), {advice}"
        ) from error
