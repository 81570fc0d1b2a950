"""A parent that starts one role and then waits to be killed: `orphaning_parent.py FUNCTION FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tailrace.config.shutdown import ShutdownSettings
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import RoleSpec


async def main(function: str, folder: str) -> None:
    grace_s = 0.3 if function == "ignore_terminate" else 60.0  # only that one needs it to pass
    async with LocalLauncher("epoch", Path(folder) / "logs", ShutdownSettings(terminate_s=grace_s)) as launcher:
        launcher.start(RoleSpec("orphan", f"role_functions:{function}", folder.encode()))
        await launcher.watch()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
