"""Slurm for one machine: its nodes are addresses of the loopback, and `srun` becomes the task that it is given.

A real `srun` forwards signals to its task and ends with its status; one that becomes the task does, too.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_SRUN = """#!/bin/bash
echo "$*" >>"$STAND_IN/steps"
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=0 SLURM_LOCALID=0
exec "$@"
"""
_SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") tr , '\\n' <<<"$3" ;;
requeue*) echo "$2" >>"$STAND_IN/requeued" ;;
*) exit 1 ;;
esac
"""


class StandInSlurm:
    """A cluster of `nodes` nodes that runs one job again and again, with what its commands were told."""

    def __init__(self, folder: Path, nodes: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.nodes = ",".join(f"127.0.0.{number}" for number in range(1, nodes + 1))
        self.commands = folder / "bin"
        self.add("srun", _SRUN)
        self.add("scontrol", _SCONTROL)

    def add(self, name: str, text: str) -> None:
        """A command of every node."""
        self.commands.mkdir(exist_ok=True)
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    @contextmanager
    def job(self, script: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        """The script as slurmd starts it; its processes are gone afterwards."""
        path = os.pathsep.join([str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        process = subprocess.Popen(
            ["bash", script],
            cwd=script.parent,
            env={
                **os.environ,
                **variables,
                "PATH": path,
                "STAND_IN": str(self.folder),
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NODELIST": self.nodes,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for left in self.processes(process):
                left.kill()
            process.wait()

    def processes(self, job: subprocess.Popen[str]) -> list[psutil.Process]:
        """Those of the job's session that have not ended."""
        found = []
        for one in psutil.process_iter():
            try:
                if os.getsid(one.pid) == job.pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    def told(self, name: str) -> list[str]:
        """What a command noted: `steps` of srun, jobs that were `requeued`."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def notify(job: subprocess.Popen[str]) -> None:
    """What `--signal=B:USR1@...` asks Slurm for."""
    job.send_signal(signal.SIGUSR1)


def commands_of(script: str) -> list[list[str]]:
    """The `tailrace` commands of a script, as the shell would hand them over, variables left as they are."""
    lines = script.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.rstrip(" &")) for line in lines if " tailrace " in line and not line.startswith("#")]
    begun = [one[one.index("tailrace") :] for one in words if "tailrace" in one]
    return [one[: one.index("||")] if "||" in one else one for one in begun]
