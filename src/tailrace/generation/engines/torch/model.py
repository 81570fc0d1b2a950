"""A transformers model that runs on the slots, or a clear refusal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tailrace.errors import ModelError
from tailrace.generation.engines.torch.attention import SLOT_ATTENTION, Segment, ShapeProbe, SlotStep
from tailrace.generation.engines.torch.cache import LayerShape, SlotCache
from tailrace.generation.engines.torch.weights import ModelWeights, PreparedModelStateDict
from tailrace.models.files import own_context, sliding_window

if TYPE_CHECKING:
    from tailrace.cpu.engine import EngineAcceleration

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
PROBE_TOKENS = 16
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.0}
"""Largest difference in nats between a model's own attention and ours, on the probe: tokens that no text has, on which
roundings in bfloat16 alone come to half a nat."""


class SlotModel:
    """The model with its attention replaced by `slot_attention`.

    Raises `ModelError` for a model that keeps more than keys and values per layer, ignores transformers' attention
    interface, or computes something else than before once its attention is replaced (found by trying).
    """

    def __init__(self, model: PreTrainedModel, *, native_kernels: bool = True):
        self.model = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self.device, self.dtype = model.device, model.dtype
        self.name = type(model).__name__
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._autocast = self.dtype is not torch.float32
        if self._autocast:
            _keep_precise(model)
        if self.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape, and shapes change all the time
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        require_supported(model)
        self.layers = self._replace_attention()
        self.acceleration = self._accelerate(native_kernels)
        self._weights = ModelWeights(model, self.acceleration)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> PreparedModelStateDict:
        """Check and pack `tensors`, in any thread. Raises `ModelError` for what cannot be this model's."""
        return self._weights.prepare(tensors)

    def install(self, prepared: PreparedModelStateDict) -> None:
        """Compute with these weights from now on; `prepared` keeps what the old ones lay in."""
        self._weights.install(prepared)

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, step: SlotStep, keep: int) -> torch.Tensor:
        """Logits of the last `keep` of the packed tokens `[num_tokens]`: `[keep, vocabulary]`."""
        options: dict[str, Any] = {"logits_to_keep": max(1, keep)} if self._keeps_logits else {}
        with self._precision():
            output = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                slot_step=step,
                **options,
            )
        logits: torch.Tensor = output.logits[0]
        return logits[len(logits) - keep :]

    def max_positions(self) -> int | None:
        """Tokens of context that the model was made for, if it says so."""
        return own_context(self.config.to_dict())

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self._autocast, cache_enabled=False)

    @torch.inference_mode()
    def _accelerate(self, native_kernels: bool) -> EngineAcceleration | None:
        """Speed up a model on a CPU, where its layers are known to compute the same then.

        None for another device, and where `tailrace.cpu` is missing or switched off.
        """
        if self.device.type != "cpu":
            return None
        try:
            from tailrace.cpu.engine import speed_up_engine
        except ImportError:
            return None
        return speed_up_engine(
            self.model, len(self.layers), self.dtype, native_kernels=native_kernels, probe=self._probe_step
        )

    def _probe_step(self) -> None:
        """Compute one running token after a prompt in the same step: the last tokens of the model's own context."""
        cache = SlotCache(self.layers, slots=1, capacity=PROBE_TOKENS, dtype=torch.float32, device=self.device)
        places = torch.arange(PROBE_TOKENS, device=self.device)
        segment = Segment(0, 0, 0, PROBE_TOKENS - 1)
        step = SlotStep(cache, torch.zeros_like(places), places, [segment], 1, PROBE_TOKENS, dtype=torch.float32)
        positions = places + max(0, (self.max_positions() or 0) - PROBE_TOKENS)
        self.logits(places % self.vocab_size, positions, step, keep=1)

    @torch.inference_mode()
    def _replace_attention(self) -> list[LayerShape]:
        token_ids = (torch.arange(PROBE_TOKENS, device=self.device) % self.vocab_size).unsqueeze(0)
        positions = torch.arange(PROBE_TOKENS, device=self.device).unsqueeze(0)
        probe = ShapeProbe()
        with self._precision():
            own = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits
            self.model.set_attn_implementation(SLOT_ATTENTION)
            ours = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, slot_step=probe).logits
        layers = [probe.layers[index] for index in sorted(probe.layers)]
        if sorted(probe.layers) != list(range(self.config.num_hidden_layers)):
            raise ModelError(
                f"{self.name} cannot run on the torch engine: {len(layers)} of its {self.config.num_hidden_layers} "
                "layers attend through transformers' attention interface"
            )
        window = sliding_window(self.config.to_dict())
        if window is not None and not probe.slides:
            raise ModelError(
                f"{self.name} cannot run on the torch engine: its sliding window of {window} tokens is known to its "
                "masks alone, which are not built here"
            )
        comparable = min(PROBE_TOKENS, window) if window else PROBE_TOKENS
        difference = _difference(own[0, :comparable], ours[0, :comparable])
        if not difference <= PROBE_TOLERANCE.get(self.dtype, 1.0):
            raise ModelError(
                f"{self.name} cannot run on the torch engine: its attention is more than scaled dot products over "
                f"keys and values (log-probabilities differ by {difference:.3g} nats on a probe)"
            )
        return layers


def require_supported(model: PreTrainedModel) -> None:
    """Raise `ModelError` where a model's class and configuration rule this engine out; it may be without memory."""
    name = type(model).__name__
    strange = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if strange:
        raise ModelError(
            f"{name} cannot run on the torch engine: it has layers of type {', '.join(sorted(strange))}, "
            "whose state is more than keys and values"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{name} cannot run on the torch engine: it does not support transformers' attention interface"
        )
    if any(weight.rpartition(".")[2] == "sinks" for weight, _ in model.named_parameters()):
        raise ModelError(
            f"{name} cannot run on the torch engine: it has attention sinks, and its attention is more than scaled dot "
            "products over keys and values"
        )


def _difference(own: torch.Tensor, ours: torch.Tensor) -> float:
    """Largest mean difference of log-probabilities, in nats, over rows of logits."""
    own, ours = own.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (own.exp() * (own - ours).abs()).sum(-1).max().item()


def _keep_precise(model: PreTrainedModel) -> None:
    """Keep embeddings, norms, the residual stream and logits in float32, as a trainer under autocast does.

    A logit of 15 in bfloat16 is off by up to 0.03 nats, and every layer adds what rounding the stream costs.
    """
    model.get_input_embeddings().float()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):
        head.float()
        head.forward = partial(_linear_in_float32, head)  # type: ignore[method-assign]


def _linear_in_float32(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return functional.linear(hidden.float(), head.weight, head.bias)
