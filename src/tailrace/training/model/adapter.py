"""Low-rank adapters (LoRA) beside a model's own weights, which stay as they are. Made by peft.

    y = W x + (alpha / rank) B A x        W [outputs, inputs] frozen, A [rank, inputs], B [outputs, rank], 0 at first

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), equation 3. Generators and checkpoints get
W + (alpha / rank) B A under the name of W, added up in a copy every time, so that W is the same after any number of
steps. All that is trained are A and B: gradients, clipping and the optimizer know nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from tailrace.errors import CheckpointError, ModelError, SettingsError
from tailrace.guards import guarded
from tailrace.models.adapter_files import CONFIG_FILE, TENSORS_FILE, is_down, layer_of, names_beside
from tailrace.training.model.checkpointed_layers import decoder_layers
from tailrace.training.model.sharding import own_part, sums_of_bits, whole
from tailrace.training.settings.lora import LoraSettings, require_peft

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER = "adapter"
"""Folder of a checkpoint: what `PeftModel.from_pretrained` loads."""

_TAKEN = "peft takes these names for experts', here and wherever it loads the adapter"
_NAME = "default"
"""Of the only adapter in a model."""
_BASE = "base_weights"
_ROUTER = re.compile(r"(^|_)gate$|router", re.IGNORECASE)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterCopy:
    """All that a checkpoint keeps of an adapter; tensors only where they were asked for."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    """By peft's names, on the CPU."""
    base: str

    def write(self, folder: Path) -> None:
        """In peft's own layout. Raises `OSError` and safetensors' own error."""
        from safetensors.torch import save_file

        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2, sort_keys=True), encoding="utf-8")
        save_file(dict(self.tensors), folder / TENSORS_FILE, metadata={"format": "pt", _BASE: self.base})


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What a run's adapter and that of a checkpoint have in common, where the run can go on from it."""

    rank: int
    alpha: float
    layers: frozenset[str] | None
    """Those that it stands beside; None where they are not known yet."""


class Adapter:
    """The adapters of one model, which `add_adapter` made."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, base: str) -> None:
        """`base` tells the frozen weights from others."""
        self._config, self._base = config, base
        self._layers = _adapted_layers(model)

    def copy(self, *, keep: bool) -> AdapterCopy:
        """For a checkpoint. All ranks call it together; tensors are kept where asked for."""
        tensors = {}
        for name, weight in self._weights():
            found = whole(weight.detach())
            if keep:
                tensors[name] = torch.empty_like(found, device="cpu").copy_(found)
        return AdapterCopy(_as_json(self._config), tensors, self._base)

    def published(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Alone, by peft's names, B times alpha / rank; for engines that add it to weights of their own.

        All ranks call it together.
        """
        scale = self._config.lora_alpha / self._config.r
        for name, weight in self._weights():
            found = whole(weight.detach())
            yield name, (found.clone() if is_down(name) else found * scale).to(dtype)

    @property
    def shape(self) -> AdapterShape:
        """What a checkpoint's must have, too."""
        return AdapterShape(self._config.r, self._config.lora_alpha, frozenset(self._layers))

    def require_own_base(self, checkpoint: Path) -> None:
        """Raise `CheckpointError` unless the adapter that was saved there is added to the same weights."""
        _, base = _tensors_in(checkpoint)
        if base != self._base:
            raise CheckpointError(
                f"checkpoint {checkpoint} is of an adapter to other weights than those of this run's model.name: to "
                f"those of {_config_in(checkpoint).get('base_model_name_or_path')!r}, as they were then"
            )

    @torch.no_grad()
    def load(self, checkpoint: Path) -> None:
        """Go on with what was saved there, which `require_own_kind` has accepted."""
        from safetensors.torch import load_file

        saved = load_file(checkpoint / ADAPTER / TENSORS_FILE)
        for name, weight in self._weights():
            weight.copy_(own_part(saved[name], weight))

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Meanwhile the model computes what it did before it was trained. Not around a backward pass."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Under the names that peft's files have."""
        for name, layer in self._layers.items():
            for own_name, modules in zip(names_beside(name), (layer.lora_A, layer.lora_B), strict=True):
                yield own_name, modules[_NAME].weight


def add_adapter(model: PreTrainedModel, settings: LoraSettings, model_name: str) -> Adapter | None:
    """Freeze the model and put adapters beside its layers; None where the settings ask for none.

    Raises `SettingsError` for targets that match nothing or that peft takes for experts', a rank larger than a layer,
    and without peft, and `ModelError` where peft adapts other layers than the targets.
    """
    if settings.rank is None:
        return None
    require_peft(settings)
    from peft import LoraConfig, inject_adapter_in_model

    base = xxhash.xxh3_64_hexdigest(repr(sums_of_bits(model)).encode())
    targets = target_layers(model, settings).keys()
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.chosen_alpha,
        lora_dropout=0.0,  # the policy that is trained is the one that samples
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_name,
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    if odd := sorted(targets ^ _adapted_layers(model).keys()):
        what = "is left out" if odd[0] in targets else "gets one too"
        raise ModelError(
            f"{type(model).__name__} cannot have the adapters of trainer.lora: peft puts them beside other layers than "
            f"it was told ({odd[0]} {what}); name fewer layers in trainer.lora.targets, or leave lora out"
        )
    return Adapter(model, config, base)


def target_layers(model: nn.Module, settings: LoraSettings) -> dict[str, nn.Linear]:
    """The layers that adapters go beside, by their names; the model may be without memory. Raises `SettingsError`."""
    linears = _linear_layers(model)
    taken = _taken_for_experts(model, linears)
    linears = {name: layer for name, layer in linears.items() if _last(name) not in taken}
    wanted = settings.targets or ()
    if settings.targets is None:
        if taken:
            kind = type(model).__name__
            _logger.info("layers of %s called %s get no adapter: %s", kind, ", ".join(taken), _TAKEN)
        chosen = {name: layer for name, layer in linears.items() if not _ROUTER.search(_last(name))}
    else:
        chosen = {name: layer for name, layer in linears.items() if any(_is_called(name, target) for target in wanted)}
    missed = [target for target in wanted if not any(_is_called(name, target) for name in chosen)]
    if missed or not chosen:
        raise SettingsError(_nothing_matches(model, linears, missed, taken))
    smallest = min(chosen, key=lambda name: min(chosen[name].weight.shape))
    outputs, inputs = chosen[smallest].weight.shape
    if settings.rank is not None and settings.rank > min(outputs, inputs):
        raise SettingsError(
            f"trainer.lora.rank = {settings.rank} is larger than {smallest}, a matrix of {outputs} x {inputs}: at most "
            f"{min(outputs, inputs)} is of use there"
        )
    return chosen


def plain_weights(model: nn.Module) -> Iterator[tuple[str, PlainWeight]]:
    """What a model's state dict would hold without adapters, tied weights once."""
    adapted = _adapted_layers(model)
    parts = [part for layer in adapted.values() for part in (layer.lora_A, layer.lora_B)]
    seen = {id(weight) for part in parts for weight in part.parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        owner, base, last = name.rpartition(".base_layer.")
        layer = adapted.get(owner)
        if layer is None or not base:
            yield name, PlainWeight(tensor)
        else:
            yield f"{owner}.{last}", PlainWeight(tensor, layer if last == "weight" else None)


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeight:
    """One tensor of a state dict, and the adapter beside it, if there is one."""

    own: Tensor
    adapted: Any = None
    """peft's layer."""

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """All ranks' shares, its adapter added in a copy, in another type where asked. All ranks call it together."""
        own = self.own.detach()
        if self.adapted is None:
            return whole(own.to(dtype or own.dtype))
        down, up = (whole(part[_NAME].weight.detach()) for part in (self.adapted.lora_A, self.adapted.lora_B))
        merged = torch.addmm(whole(own), up, down, alpha=self.adapted.scaling[_NAME])
        return merged.to(dtype or own.dtype)


def require_own_kind(checkpoint: Path, adapter: Adapter | None) -> None:
    """Raise `CheckpointError` unless a run with this adapter, or one without, can go on from a checkpoint."""
    if why_not := other_adapter(checkpoint, None if adapter is None else adapter.shape):
        raise CheckpointError(why_not)
    if adapter is not None:
        adapter.require_own_base(checkpoint)


def other_adapter(checkpoint: Path, shape: AdapterShape | None) -> str:
    """Why a run with an adapter of this shape, or one without, cannot go on from a checkpoint; empty where it can.

    Raises `CheckpointError` for a damaged one.
    """
    has_one = (checkpoint / ADAPTER).is_dir()
    new_run = f"or begin a new run with model.name = {str(checkpoint)!r}"
    if shape is None and not has_one:
        return ""
    if shape is None:
        return (
            f"checkpoint {checkpoint} is of an adapter, and this run trains all weights: write trainer.lora.rank = "
            f"{_config_in(checkpoint).get('r')} as it was, {new_run}, where the adapter is part of the weights"
        )
    if not has_one:
        return (
            f"checkpoint {checkpoint} is of a run that trains all weights, and trainer.lora.rank asks for an adapter: "
            f"leave trainer.lora out, {new_run}"
        )
    found, (names, _) = _config_in(checkpoint), _tensors_in(checkpoint)
    layers = set(map(layer_of, names))
    own_layers = layers if shape.layers is None else shape.layers
    for what, theirs, ours in (
        ("rank", found.get("r"), shape.rank),
        ("alpha", found.get("lora_alpha"), shape.alpha),
        ("targets", _last_names(layers), _last_names(own_layers)),
    ):
        if theirs != ours:
            why = " (an earlier version chose other layers of some models)" if what == "targets" else ""
            return (
                f"checkpoint {checkpoint} is of another adapter than this run's: its {what} ({theirs}) would be "
                f"{ours}; leave trainer.lora.{what} as it was, {new_run}{why}"
            )
    if layers != own_layers:
        return f"checkpoint {checkpoint} is of an adapter beside other layers than this run's: name those, {new_run}"
    return ""


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Those of decoder layers, by their names in the model. The head is none: its logits are computed in chunks."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {name: one for name, one in model.named_modules() if id(one) in inside and type(one) is nn.Linear}


def _taken_for_experts(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Which last names of layers peft turns into those of experts in such a model, wherever it loads an adapter.

    It takes them for names of before, when each expert had layers of its own. Dense and shared ones still have them.
    """
    if importlib.util.find_spec("peft") is None:  # the trainer, which needs it, is elsewhere
        return []
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken = []
    for name in dict.fromkeys(map(_last, layers)):
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, None)
            is_kept = config.target_modules == {name}
        except ValueError:  # the name is of two that became one, and the other is not there
            is_kept = False
        if not is_kept:
            taken.append(name)
    return taken


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Those that peft has put adapters beside, by their names; peft need not be there where there are none."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _is_called(name: str, target: str) -> bool:
    """As peft has it: by its last names.

    >>> [_is_called("model.layers.0.self_attn.q_proj", name) for name in ("q_proj", "self_attn.q_proj", "proj")]
    [True, True, False]
    """
    return name == target or name.endswith(f".{target}")


def _last(name: str) -> str:
    """Of a layer's name, what it is called in its block."""
    return name.rpartition(".")[2]


def _nothing_matches(
    model: nn.Module, linears: Mapping[str, nn.Linear], missed: list[str], taken: Sequence[str]
) -> str:
    kind = type(model).__name__
    if not linears:
        return f"trainer.lora: {kind} has no linear layers in a decoder that adapters could go beside: leave lora out"
    there = ", ".join(dict.fromkeys(map(_last, linears)))
    if of_experts := [target for target in missed if _last(target) in taken]:
        wrong = ", ".join(map(repr, of_experts))
        return f"trainer.lora.targets: {wrong} of {kind} can have no adapter: {_TAKEN}; there are {there}"
    experts = any(weight.dim() == 3 for weight in model.parameters())
    why = "; experts, whose matrices are one parameter, can have none" if experts else ""
    wrong = ", ".join(map(repr, missed))
    return f"trainer.lora.targets: {wrong} matches no linear layer of {kind}; there are {there}{why}"


def _last_names(layers: Iterable[str]) -> str:
    """For people.

    >>> _last_names(["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"])
    'q_proj, up_proj'
    """
    return ", ".join(sorted(set(map(_last, layers))))


def _config_in(checkpoint: Path) -> dict[str, Any]:
    with guarded(f"checkpoint {checkpoint} is damaged: its {CONFIG_FILE} is no adapter's", CheckpointError):
        return {**json.loads((checkpoint / ADAPTER / CONFIG_FILE).read_text(encoding="utf-8"))}


def _tensors_in(checkpoint: Path) -> tuple[set[str], str | None]:
    """Names of the adapter's tensors, and what tells the weights that it is added to."""
    from safetensors import safe_open

    damaged = guarded(f"checkpoint {checkpoint} is damaged: its {TENSORS_FILE} is no adapter's", CheckpointError)
    with damaged, safe_open(checkpoint / ADAPTER / TENSORS_FILE, framework="pt") as file:
        return set(file.keys()), (file.metadata() or {}).get(_BASE)


def _as_json(config: LoraConfig) -> dict[str, Any]:
    """As peft writes it: sets as lists, for loading alone."""
    found = config.to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}
