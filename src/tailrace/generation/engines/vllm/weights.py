"""Installs a model state dict in place: checked whole before vLLM sees the first tensor."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tailrace.errors import EngineFailed, ModelError
from tailrace.generation.engines.prefetch import StagingBuffers
from tailrace.generation.engines.vllm.adapters import AdapterInstaller, is_adapter
from tailrace.generation.engines.vllm.packing import PackedModelStateDict, forget_packed_experts, weight_packer
from tailrace.models.files import quantization
from tailrace.models.loading import model_without_memory
from tailrace.models.state_dicts import StateDictLayout
from tailrace.transport.owned_folders import OwnedFolder, own_shared_memory, remove_leftovers
from tailrace.transport.weights.transfers import OfferedModelStateDict

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.worker.worker_base import WorkerBase as Worker

_WRONG_KIND = (
    "an engine with generator.vllm.enable_lora takes adapters alone, and any other whole weights: "
    "trainer.lora.publish says what it gets"
)


class SavedModelStateDict(dict[str, torch.Tensor]):
    """A model state dict in a file, which is removed with the last reference to this."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: Path | None) -> None:
        from safetensors.torch import save_file

        super().__init__()
        self._own_folder(where)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, self.folder.path / "model.safetensors", metadata={"format": "pt"})

    def _own_folder(self, where: Path | None) -> None:
        """In shared memory by default, from which goes before what a killed generator left there of its own weights."""
        if where is None:
            remove_leftovers()
        self.folder: OwnedFolder = own_shared_memory(uuid.uuid4().hex, where)
        weakref.finalize(self, self.folder.remove)


class StagedModelStateDict(dict[str, torch.Tensor]):
    """A model state dict that was checked, where the only worker can copy it."""


class SavedAdapter(SavedModelStateDict):
    """An adapter in a folder of peft's layout, which is removed with the last reference to this."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: Path | None, adapters: AdapterInstaller) -> None:
        dict.__init__(self)
        self._own_folder(where)
        adapters.write(tensors, self.folder.path)


class WeightInstaller:
    """Knows what a model state dict of the model must hold, and how to hand one to vLLM's workers."""

    def __init__(
        self, core: InprocClient, config: PretrainedConfig, *, in_process: bool, folder: Path | None = None
    ) -> None:
        """`folder` is for what workers read, where they see no memory of this machine."""
        self._core = core
        self._folder = folder
        self._quantization = quantization(config.to_dict())
        """Of the model's files, whose weights vLLM keeps packed. Plain ones that it quantizes itself, as its options
        ask, can be replaced by plain ones.
        """
        self._in_process = in_process
        """Whether the only worker lives in this process, and can be handed tensors."""
        self._layout = StateDictLayout(model_without_memory(config))
        engine_config = core.engine_core.vllm_config
        has_adapter = engine_config.lora_config is not None
        self.adapters = AdapterInstaller(core, self._layout, engine_config) if has_adapter else None
        self._workers: int = engine_config.parallel_config.world_size
        self._packer = weight_packer(core) if in_process else None
        self._staging = StagingBuffers(_device_of_worker(core) if in_process else torch.device("cpu"))

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Do what needs no stop of the engine, in any thread, one at a time; what `install` is to be given.

        Workers that are other processes read the weights from shared memory, or a folder that all of their nodes see,
        each its own part. Raises `ModelError` for what cannot be this model's.
        """
        if is_adapter(tensors) != (self.adapters is not None):
            raise ModelError(_WRONG_KIND)
        if self.adapters is not None:
            return SavedAdapter(tensors, self._folder, self.adapters)
        if self._quantization is not None:
            raise ModelError(
                f"the vLLM engine began with quantized weights ({self._quantization}): it keeps them packed, and takes "
                "no plain ones, which are trained: start it with the model's bfloat16 weights"
            )
        named = self._layout.checked(tensors)
        if isinstance(tensors, OfferedModelStateDict):
            return tensors
        if self._packer is not None:
            return self._packer.pack(named)
        if self._in_process:
            return StagedModelStateDict(self._staging.fill(named))
        return SavedModelStateDict(named, self._folder)

    def install(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors` into vLLM's own. Raises `ModelError` for what cannot be this model's; then nothing changed.

        Weights that are tied may come under any or all of their names. Raises `EngineFailed` when vLLM itself fails in
        the middle: then no one knows which weights it has.
        """
        ready = PackedModelStateDict | StagedModelStateDict | SavedModelStateDict | OfferedModelStateDict
        if not isinstance(tensors, ready):
            tensors = self.prepare(tensors)
        try:
            if isinstance(tensors, PackedModelStateDict):
                assert self._packer is not None
                self._packer.exchange(tensors)
                self._core.collective_rpc(_forget_derived)
            elif isinstance(tensors, OfferedModelStateDict):
                tensors.receive(self._workers, self._call_workers)
                self._core.collective_rpc(_forget_derived)
            elif isinstance(tensors, SavedAdapter):
                assert self.adapters is not None
                self.adapters.install(tensors.folder.path)
                tensors.folder.remove()
            elif isinstance(tensors, SavedModelStateDict):
                self._core.collective_rpc(_reload, kwargs={"weights_path": str(tensors.folder.path)})
                tensors.folder.remove()
            else:
                self._core.collective_rpc(_reload, kwargs={"weights_iterator": iter(tensors.items())})
                self._staging.wait_until_copied()
        except Exception as error:
            raise EngineFailed(f"vLLM failed while it took over a model state dict: {error}") from error

    def _call_workers(self, method: str, argument: dict[str, Any] | None) -> None:
        self._core.collective_rpc(method, args=() if argument is None else (argument,))


def _device_of_worker(core: InprocClient) -> torch.device:
    worker = core.engine_core.model_executor.driver_worker.worker
    device: torch.device = next(worker.model_runner.get_model().parameters()).device
    return device


def _forget_derived(worker: Worker) -> None:
    """Runs on vLLM's worker, as after its own reload: what was computed by old weights apart from keys and values."""
    worker.model_runner.reset_lora_state()
    worker.model_runner.reset_encoder_cache()
    worker.model_runner.reset_mm_cache()


def _reload(worker: Worker, **source: object) -> None:
    """Runs on every worker of vLLM.

    On a CPU vLLM keeps a packed copy of the head, and does not pack it again where the head is tied to the embeddings:
    it would go on with the old head over the new body.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    modules = [*worker.model_runner.get_model().modules()]
    if current_platform.is_cpu():
        for module in modules:
            forget_packed_experts(module)
    worker.reload_weights(**source)
    for module in modules:
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
