"""New weights packed for vLLM's CPU kernels beside generation, so that installing them is an exchange.

On a CPU vLLM computes with packed copies of its matrices. Packing takes as long as about ten copies of the weights, and
vLLM's own reload does it while nothing steps. Here a second model, without memory between loads, packs the new weights
in the staging thread; between two steps the engine exchanges the packed matrices and copies embeddings, norms, biases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import InprocClient

_Linear: TypeAlias = Callable[..., torch.Tensor]


@dataclass(slots=True)
class _Layer:
    """One module's weights, ready."""

    packed: _Linear | None
    """Computes with the packed matrix, which it owns; None where nothing is packed."""
    parameters: Mapping[str, torch.Tensor]


class PackedModelStateDict(dict[str, torch.Tensor]):
    """A model state dict that `WeightPacker.exchange` takes, with what it packed instead of the tensors."""

    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__()
        self.layers = layers
        self.retired: list[_Linear] = []
        """The old packed matrices: whoever drops the last reference to this frees them."""


class WeightPacker:
    """Packs for one model. Make it in the engine's thread; `pack` may run in another, one at a time."""

    def __init__(self, live: nn.Module, shadow: nn.Module) -> None:
        self._live = [*live.modules()]
        self._shadow = shadow
        self._layers = [*shadow.modules()]
        self._empty = [dict(layer._parameters) for layer in self._layers]
        self._packable = _packable(self._layers)

    @torch.no_grad()
    def pack(self, named: Mapping[str, torch.Tensor]) -> PackedModelStateDict:
        """Take in a whole model state dict; needs about two copies of its memory until it is exchanged."""
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

        filled: dict[int, torch.Tensor] = {}
        for layer, empty in zip(self._layers, self._empty, strict=True):
            for name, parameter in empty.items():
                if parameter is not None:  # tied ones are one
                    tensor = filled.get(id(parameter))
                    filled[id(parameter)] = tensor = materialize_meta_tensor(parameter) if tensor is None else tensor
                    layer._parameters[name] = tensor  # type: ignore[assignment]
        try:
            self._shadow.load_weights(iter(named.items()))  # type: ignore[operator]
            for layer in self._packable:
                forget_packed_experts(layer)
                layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]
            return PackedModelStateDict([_taken(layer) for layer in self._layers])
        finally:
            for layer, empty in zip(self._layers, self._empty, strict=True):
                layer._parameters.update(empty)

    @torch.no_grad()
    def exchange(self, packed: PackedModelStateDict) -> None:
        """Make the model compute with these weights. The old ones are kept in `packed.retired`."""
        copied: set[int] = set()
        for layer, new in zip(self._live, packed.layers, strict=True):
            if new.packed is not None:
                packed.retired.append(layer.cpu_linear)  # type: ignore[arg-type]
                layer.cpu_linear = new.packed  # type: ignore[assignment]
            for name, tensor in new.parameters.items():
                parameter = layer._parameters[name]
                if parameter is not None and id(parameter) not in copied:
                    copied.add(id(parameter))
                    parameter.data.copy_(tensor.data)
        packed.layers = []


def weight_packer(core: InprocClient) -> WeightPacker | None:
    """For the model of a core with its worker in this process. None where vLLM packs nothing, or else than is known
    here: quantized weights, compiled graphs.
    """
    from vllm.config import CompilationMode
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = core.engine_core.vllm_config
    if not current_platform.is_cpu() or config.compilation_config.mode != CompilationMode.NONE:
        return None
    live: nn.Module = core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}  # the live model's layers keep their names there
    try:
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            shadow: nn.Module = initialize_model(own)
    except RuntimeError:  # of a model that cannot be made without memory
        return None
    return WeightPacker(live, shadow) if _are_alike(live, shadow) else None


def _are_alike(live: nn.Module, shadow: nn.Module) -> bool:
    """Whether every weight of the live model is known to be either packed by its layer alone, or left as it came."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    if [name for name, _ in live.named_modules()] != [name for name, _ in shadow.named_modules()]:
        return False
    for mine, other in zip(live.modules(), shadow.modules(), strict=True):
        method = getattr(mine, "quant_method", None)
        if mine._parameters and method is not None and not isinstance(method, known):
            return False
        if mine._parameters.keys() != other._parameters.keys():
            return False
        if not all(_is_alike(mine, one, other._parameters[name]) for name, one in mine._parameters.items()):
            return False
    return True


def _is_alike(layer: nn.Module, live: torch.Tensor | None, shadow: torch.Tensor | None) -> bool:
    if live is None or shadow is None:
        return live is shadow
    is_dropped = live.numel() == 0 and "cpu_linear" in layer.__dict__
    return is_dropped or live.shape == shadow.shape


def forget_packed_experts(layer: nn.Module) -> None:
    """Let a layer of experts be packed anew: vLLM packs them on a CPU once, and then takes raw ones for packed."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        method.moe_kernel = None


def _packable(layers: list[nn.Module]) -> list[nn.Module]:
    """Those that compute with a packed matrix: where there is a head of its own, embeddings are only looked up."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    has_head = any(isinstance(layer, ParallelLMHead) for layer in layers)
    return [
        layer
        for layer in layers
        if getattr(layer, "quant_method", None) is not None
        and layer._parameters
        and not (has_head and isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead))
    ]


def _taken(layer: nn.Module) -> _Layer:
    parameters = {name: one for name, one in layer._parameters.items() if one is not None}
    return _Layer(layer.__dict__.pop("cpu_linear", None), parameters)
