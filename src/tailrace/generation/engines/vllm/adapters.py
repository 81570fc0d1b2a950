"""Adapters (LoRA) that vLLM adds to weights it keeps: every request runs with the only one, which is replaced in place.

    trainer ── A, B by peft's names ──► folder in shared memory ──► every worker's slot

It is there from the start, all zeros, so that a request that began under one version goes on under the next. vLLM keys
its prefix cache by the adapter's name, which stays; what tells versions apart there is each request's salt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from tailrace.errors import ModelError, SettingsError
from tailrace.models.adapter_files import CONFIG_FILE, TENSORS_FILE, is_down, layer_of
from tailrace.models.state_dicts import StateDictLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.worker.worker_base import WorkerBase as Worker

_NAME, _NUMBER = "policy", 1
_NOWHERE = "/nonexistent"
"""Requests name an adapter that is loaded, so that nobody reads its folder."""


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a model state dict is an adapter's, by the names of its tensors."""
    return any(map(is_down, names))


def adapter_options(given: Mapping[str, object]) -> dict[str, object]:
    """What `given` options of vLLM come to, which has room for ranks of some sizes alone. Imports vLLM.

    Raises `SettingsError` for a rank that is larger than all of them.
    """
    from vllm.config.lora import MaxLoRARanks

    rank = given.get("max_lora_rank")
    if not given.get("enable_lora") or not isinstance(rank, int):
        return {}
    sizes = sorted(get_args(MaxLoRARanks))
    if rank > sizes[-1]:
        raise SettingsError(f"vLLM takes adapters of rank {sizes[-1]} at most, and they are of {rank}")
    return {"max_lora_rank": next(size for size in sizes if size >= rank)}


class AdapterInstaller:
    """Puts an adapter into a core that was made with `enable_lora`."""

    def __init__(self, core: InprocClient, layout: StateDictLayout, config: VllmConfig) -> None:
        assert config.lora_config is not None
        self._core, self._layout = core, layout
        self._max_rank: int = config.lora_config.max_lora_rank
        core.collective_rpc(_add_zeros, args=(self.request,))

    @property
    def request(self) -> LoRARequest:
        """What every request to the core carries."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(_NAME, _NUMBER, _NOWHERE)

    def write(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """In peft's layout. Raises `ModelError` for what cannot be an adapter of this model."""
        from safetensors.torch import save_file

        rank = self._require_fitting(tensors)
        layers = sorted({layer_of(name) for name in tensors})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
        (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / TENSORS_FILE, metadata={"format": "pt"})

    def install(self, folder: Path) -> None:
        """Every worker takes it over from there."""
        from vllm.lora.request import LoRARequest

        self._core.add_lora(LoRARequest(_NAME, _NUMBER, str(folder), load_inplace=True))

    def _require_fitting(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The rank that all of its layers have."""
        ranks = {len(tensor) for name, tensor in tensors.items() if is_down(name)}
        rank = max(ranks)
        if len(ranks) > 1 or rank > self._max_rank:
            raise ModelError(
                f"an adapter of rank {rank} was published, and the engine takes {self._max_rank} at most: raise "
                "generator.vllm.max_lora_rank"
            )
        for name, tensor in tensors.items():
            outputs, inputs = self._layout.shape_of(f"{layer_of(name)}.weight")
            expected = (rank, inputs) if is_down(name) else (outputs, rank)
            if tuple(tensor.shape) != expected:
                raise ModelError(f"adapter weight {name} is {list(tensor.shape)}, and {list(expected)} is expected")
        return rank


def _add_zeros(worker: Worker, request: LoRARequest) -> None:
    """Runs on every worker."""
    worker.model_runner.lora_manager.add_dummy_lora(request, rank=1)
