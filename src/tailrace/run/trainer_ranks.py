"""Where the ranks of a run's trainer meet, and how others than the run's own launcher start them.

tailrace train                                       starts every rank as a role of its own
torchrun --nproc-per-node 2 -m tailrace train ...    }  process 0 runs the command, whose trainer is rank 0; each
srun --ntasks 2 tailrace train ...                   }  other process is given the role of one more rank by it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tailrace.errors import LifecycleError, SettingsError
from tailrace.lifecycle.early_signals import leave_to_another_process
from tailrace.lifecycle.processes import spawn_role
from tailrace.lifecycle.roles import RoleSpec
from tailrace.run.host_transports import TransportAddresses
from tailrace.run.ranks import Rank
from tailrace.training.settings.trainer import TrainerSettings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MEETING = "trainer-ranks"
_ORPHAN_GRACE_S = 5.0
_SLURM_PORTS = range(10_000, 20_000)
"""Below those that roles choose from (`free_ports`), and that systems give to whoever asks for any."""
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def trainer_store(where: TransportAddresses, size: int) -> Store:
    """Where ranks of one host meet: a file of the run's own, so that no port is taken."""
    import torch.distributed as dist

    meeting = Path(where.shared_memory) / f"{_MEETING}-{where.trainer_life}"
    store: Store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    return store


def launched_rank(trainer: TrainerSettings, environment: Mapping[str, str] = os.environ) -> Rank | None:
    """This process among those that torchrun or srun started; None if alone. Raises `SettingsError` where it cannot be.

    >>> slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    >>> launched_rank(TrainerSettings(ranks=2), slurm).number
    1
    >>> launched_rank(TrainerSettings(ranks=3), slurm)
    Traceback (most recent call last):
        ...
    tailrace.errors.SettingsError: trainer.ranks is 3, and 2 processes were started: give both the same number
    """
    rank = _rank_of(environment)
    if rank is None or rank.size == 1:
        return None
    if rank.size != trainer.ranks:
        raise SettingsError(
            f"trainer.ranks is {trainer.ranks}, and {rank.size} processes were started: give both the same number",
            key=("trainer", "ranks"),
        )
    if not _is_on_one_machine(rank, environment):
        raise SettingsError(
            f"{rank.size} processes were started on several machines, and the roles of a run meet in one machine's "
            "memory: start them all on one"
        )
    return rank


class LaunchedRanks:
    """Tells the processes of all other ranks what to be. They may ask for as long as this lives."""

    def __init__(self, rank: Rank) -> None:
        """Raises `SettingsError` where the others cannot find it."""
        try:
            self._store = _launchers_store(rank)
        except RuntimeError as error:
            raise SettingsError(
                f"process 0 of {rank.size} cannot use port {rank.port} of {rank.host}, where the others look for it: "
                "export another MASTER_PORT, each step a free one of its own, or none under srun "
                f"({str(error).splitlines()[0]})"
            ) from error

    def give_roles(self, specs: Sequence[RoleSpec]) -> None:
        """To each the role that is its rank's by name."""
        for spec in specs:
            self._store.set(_key(spec.name), msgspec.json.encode(spec).decode())


def take_role(rank: Rank, trainer: TrainerSettings) -> int:
    """Be the rank of the trainer that process 0 says, in a process of its own; its exit status.

    Signals to stop are left to process 0, which needs every rank for its last save. In the main thread of a command.
    """
    try:
        text = _launchers_store(rank).get(_key(trainer.rank_names[rank.number]))
    except RuntimeError as error:
        raise LifecycleError(f"process 0 of {rank.size} did not start a run: {error}") from error
    spec = msgspec.json.decode(text, type=RoleSpec)
    leave_to_another_process()
    process, lifeline = spawn_role(spec, orphan_grace_s=_ORPHAN_GRACE_S, leads_group=False)
    with lifeline:
        return process.wait()


def _rank_of(environment: Mapping[str, str]) -> Rank | None:
    if "TORCHELASTIC_RUN_ID" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_STEP_NUM_TASKS" in environment:  # srun's; a batch script has SLURM_NTASKS and is one process
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return None
    number, size, local = (int(environment.get(name, "0")) for name in names)
    host, port = environment.get("MASTER_ADDR", "127.0.0.1"), environment.get("MASTER_PORT")
    return Rank(number=number, size=size, host=host, port=int(port or _slurm_port(environment)), local=local)


def _slurm_port(environment: Mapping[str, str]) -> int:
    """Of one step of one job, whose processes all know it: others may run on the same node.

    >>> _slurm_port({"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}), _slurm_port({"SLURM_JOB_ID": "4712"})
    (16967, 17064)
    """
    job, step = (int(environment.get(name, "0")) for name in _SLURM_STEP)
    return _SLURM_PORTS[(97 * job + step) % len(_SLURM_PORTS)]


def _is_on_one_machine(rank: Rank, environment: Mapping[str, str]) -> bool:
    if "TORCHELASTIC_RUN_ID" in environment:
        return environment.get("LOCAL_WORLD_SIZE") == str(rank.size)
    return environment.get("SLURM_STEP_NUM_NODES", "1") == "1"


def _launchers_store(rank: Rank) -> Store:
    """torchrun's own, which is there already; under srun that of process 0."""
    import torch.distributed as dist

    is_master = rank.number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: Store = dist.TCPStore(rank.host, rank.port, is_master=is_master, wait_for_workers=False)  # type: ignore[attr-defined]
    return store


def _key(name: str) -> str:
    """Of one step of Slurm's: should two meet at one port all the same, neither takes the other's role."""
    step = ".".join(os.environ.get(variable, "") for variable in _SLURM_STEP)
    return f"tailrace/role of {name} in step {step}"
