"""An optimizer's moments, by names of weights, as all ranks write them into a checkpoint and any number reads them.

    optimizer ── copies ──► {"weight/exp_avg": ..., "weight/step": ...} ── torch DCP ──► __R_0.distcp of rank R
                                                                                     └──► .metadata

Every rank writes its shares, and reads what its shares need from whichever files hold it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from tailrace.errors import CheckpointError
from tailrace.guards import guarded
from tailrace.training.model.sharding import own_part, own_share
from tailrace.training.ranks import JoinedRanks, Ranks
from tailrace.training.settings.trainer import OptimizerName
from tailrace.training.step.offloaded_moments import OffloadedAdamW, on_host
from tailrace.training.step.optimizer import moment_kinds, name_by_moments

Moments: TypeAlias = dict[str, Tensor]
"""By `weight/kind`. On the CPU; of a weight that is shared out this rank's share, as a `DTensor`."""


def copy_moments(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Moments:
    """Of every weight that was ever updated."""
    shares, kinds = Shares(ranks), moment_kinds(optimizer)
    return {
        f"{name}/{kind}": shares.copy(value, value if kind == "step" else weight)
        for name, weight in model.named_parameters()
        if weight in optimizer.state
        for kind in kinds[weight]
        for value in (optimizer.state[weight][kind],)
    }


def write_moments(folder: Path, moments: Moments, ranks: Ranks) -> None:
    """Write this rank's shares; returns when all ranks' are on the disk. In any one thread. Raises `RankLost`."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with ranks.exchanging():
        save(cast("dict[str, Any]", moments), storage_writer=writer, **_group(ranks))


def other_optimizer(folder: Path, chosen: OptimizerName) -> str:
    """Why an optimizer cannot go on with the moments in a checkpoint's folder; empty where it can.

    Raises `CheckpointError` where they cannot be read.
    """
    with guarded(f"checkpoint {folder.parent} has no moments that can be read", CheckpointError):
        kinds = {key.rpartition("/")[2] for key in _written(folder)}
    if not kinds:  # of a run before its first step
        return ""
    saved = name_by_moments(kinds)
    if saved == chosen:
        return ""
    return (
        f"checkpoint {folder.parent} is of another optimizer than trainer.optimizer says: it has the moments of "
        f"{saved!r}, and this run's is {chosen!r}; write trainer.optimizer = {saved!r} as it was, or begin a new run "
        f"with model.name = {str(folder.parent)!r}"
    )


def empty_moments(folder: Path, model: nn.Module, shares: Shares) -> Moments:
    """This rank's shares of what any number of ranks wrote, yet to be read. Waits for no other rank.

    Raises `KeyError` or `ValueError` for those of another model, and what reading a damaged file raises.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    weights = dict(model.named_parameters())
    moments: Moments = {}
    for key, entry in _written(folder).items():
        name, _, kind = key.rpartition("/")
        if name not in weights or not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"it has no weight {name!r}")
        like = weights[name] if kind != "step" else torch.zeros(())
        if entry.size != like.shape:
            raise ValueError(f"{key} is {list(entry.size)}, and the weight {list(like.shape)}")
        moments[key] = shares.empty(like, entry.properties.dtype)
    return moments


def read_moments(folder: Path, moments: Moments, ranks: Ranks) -> None:
    """Into what `empty_moments` made, with all ranks. Raises `RankLost`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with ranks.exchanging():
        load(cast("dict[str, Any]", moments), storage_reader=FileSystemReader(folder), **_group(ranks))


def set_moments(moments: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on with these. Whole ones are shared out as their weights are. Settings of the optimizer stay its own.

    Raises `ValueError` for a kind that the optimizer keeps none of.
    """
    weights, kinds = dict(model.named_parameters()), moment_kinds(optimizer)
    optimizer.state.clear()
    for key, value in moments.items():
        name, _, kind = key.rpartition("/")
        weight = weights[name]
        if kind not in kinds[weight]:
            raise ValueError(f"it has {key}, which trainer.optimizer does not keep of this weight")
        found = value.to(weight.device) if kind == "step" else _placed(value, weight)
        if kind != "step" and isinstance(optimizer, OffloadedAdamW):
            found = on_host(found)
        optimizer.state[weight][kind] = found


def _written(folder: Path) -> Mapping[str, object]:
    """What is told of each moment that any rank wrote, by its name."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(folder).read_metadata().state_dict_metadata


def _placed(value: Tensor, weight: Tensor) -> Tensor:
    """A moment where its weight is, shared out alike."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor) and isinstance(weight, DTensor):
        local = value.to_local().to(weight.device)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
    if value.shape != weight.shape:
        raise ValueError(f"a moment is {list(value.shape)}, and its weight {list(weight.shape)}")
    return own_part(value, weight)


class Shares:
    """Copies on the CPU, of a rank's shares as `DTensor`s over all ranks' CPUs, as DCP wants them.

    Make it on all ranks at once: torch may connect them for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._mesh = ranks.mesh("cpu") if isinstance(ranks, JoinedRanks) else None

    def copy(self, tensor: Tensor, like: Tensor) -> Tensor:
        """`tensor`, or this rank's share of it, as `like` is shared out."""
        own = own_share(tensor).detach()
        return self._as_share(torch.empty_like(own, device="cpu").copy_(own), like)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Of this rank's share of `like`, to be filled."""
        return self._as_share(torch.empty_like(own_share(like).detach(), device="cpu", dtype=dtype), like)

    def _as_share(self, own: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(like, DTensor):
            return own
        assert self._mesh is not None
        return DTensor.from_local(own, self._mesh, like.placements, shape=like.shape, stride=like.stride())


def _group(ranks: Ranks) -> dict[str, Any]:
    # Asked to work alone, DCP warns that it will.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    return {"process_group": ranks.checkpoints} if isinstance(ranks, JoinedRanks) else {"no_dist": True}
