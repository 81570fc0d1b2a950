"""Weights of a trainer outside, on their way to a run's generators: in a folder, or from GPU to GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tailrace.errors import SettingsError
from tailrace.records import WeightsOffered, WeightsWritten
from tailrace.transport.weights.transfer_sockets import TransferPlace
from tailrace.transport.weights.transfers import TransferringModelStateDictStore, nccl_init_info

if TYPE_CHECKING:
    import torch

OutsideWeights: TypeAlias = "str | os.PathLike[str] | Mapping[str, torch.Tensor]"
"""A folder in Hugging Face layout, or tensors by the names that they have there."""


class WeightAnnouncer:
    """The trainer's end: makes weights reachable, and says how."""

    def __init__(self, transfers: str, call_s: float) -> None:
        """`transfers` is where the run's generators ask for weights, which may take so long for a call of a transfer;
        empty where they read them in folders.
        """
        self._transfers, self._call_s = transfers, call_s
        self._offers: TransferringModelStateDictStore | None = None

    def tell(self, consumer: str, version: int, weights: OutsideWeights) -> WeightsWritten | WeightsOffered:
        """What `consumer` reports. Tensors are copied where they are, and may change as soon as this returns.

        Raises `SettingsError` for the one way where the run goes by the other, `TransportError` where nothing can be
        offered.
        """
        if not isinstance(weights, Mapping):
            return WeightsWritten(consumer=consumer, version=version, folder=str(Path(weights).absolute()))
        self._offers = self._offers or self._open()
        ref = self._offers.publish(_copied(weights), version)
        return WeightsOffered(consumer=consumer, ref=ref)

    def close(self) -> None:
        """Offer nothing more. Closing twice does nothing."""
        if self._offers is not None:
            self._offers.close()

    def _open(self) -> TransferringModelStateDictStore:
        if not self._transfers:
            raise SettingsError(
                "this run takes weights from folders: save them and name the folder; or let it take them from this "
                'process, by transport.weights = "nccl", and join it by its folder, on its host'
            )
        if find_spec("vllm") is None:
            raise SettingsError(
                "transport.weights = \"nccl\" sends weights by the trainer's side of vLLM's own transfer: install the "
                "vllm of the run's generators in this environment too, or leave weights in a folder"
            )
        return TransferringModelStateDictStore(TransferPlace(Path(self._transfers)), self._call_s, nccl_init_info)


def _copied(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where they are; other threads and streams may read the copies once this returns."""
    import torch

    copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
    for device in {tensor.device for tensor in copies.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
