"""A parent that starts one role and then waits to be killed: `orphaning_parent.py FUNCTION FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tailrace.lifecycle.supervisor import Supervisor

from tailrace.lifecycle.roles import RoleSpec
from tailrace.lifecycle.settings import ShutdownSettings


async def main(function: str, folder: str) -> None:
    grace_s = 0.3 if function == "ignore_terminate" else 60.0  # only that one needs it to pass
    async with Supervisor(Path(folder) / "logs", ShutdownSettings(terminate_s=grace_s)) as supervisor:
        supervisor.start(RoleSpec("orphan", f"role_functions:{function}", folder.encode()))
        await supervisor.watch()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
