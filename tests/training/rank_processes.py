"""Ranks of a trainer as processes of this machine, each of which runs one function."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

PATIENCE_S = 120.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tailrace.training.trainer", "tests.training.tiny", "torch.distributed.fsdp", "peft"])
"""Its processes begin with torch and transformers, which take seconds to import."""

Work = Callable[..., Any]


def run_ranks(
    work: Work,
    size: int,
    folder: Path,
    *arguments: object,
    ranks_per_row: int = 1,
    deadline_s: float = PATIENCE_S,
    missing: int | None = None,
) -> list[Any]:
    """What `work(ranks, *arguments)`, a function of a module, returned on each rank, or raised; None of `missing`."""
    folder.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank in range(size):
        ours, its = CONTEXT.Pipe(duplex=False)
        meeting = _Meeting(rank, size, ranks_per_row, str(folder / "store"), deadline_s)
        processes.append(CONTEXT.Process(target=_run, args=(its, meeting, work, arguments), daemon=True))
        processes[-1].start()
        its.close()
        pipes.append(ours)
    results = [None if rank == missing else _result(pipe) for rank, pipe in enumerate(pipes)]
    for process in processes:
        process.kill()
        process.join()
    return results


class _Meeting(NamedTuple):
    rank: int
    size: int
    ranks_per_row: int
    store: str
    deadline_s: float


def _result(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "a rank neither answers nor ends"
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def _run(pipe: Connection, meeting: _Meeting, work: Work, arguments: tuple[object, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    import torch.distributed as dist

    from tailrace.training.ranks import JoinedRanks

    try:
        store = dist.FileStore(meeting.store, meeting.size)
        ranks = JoinedRanks(
            *(store, meeting.rank, meeting.size),
            device="cpu",
            deadline_s=meeting.deadline_s,
            ranks_per_row=meeting.ranks_per_row,
        )
        _send(pipe, work(ranks, *arguments))
    except Exception as error:  # noqa: BLE001 - for the test to look at
        traceback.print_exc()
        _send(pipe, error)
    os._exit(0)


def _send(pipe: Connection, result: object) -> None:
    """The bytes of tensors too: this process ends before the other looks."""
    content = io.BytesIO()
    torch.save(result, content)
    pipe.send_bytes(content.getvalue())
