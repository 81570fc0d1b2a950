"""A transformers model as the trainer uses it: packed rows in, per-token losses out.

No architecture is known by name. What packing and the chunked head assume is tested once, on the model itself, with a
few tokens; a model that answers otherwise (a state that runs along the row, a head of several layers, ...) is trained
sample by sample or through whole logits, which is slower and right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from tailrace.errors import ModelError
from tailrace.models.files import rotary_limit, sliding_window
from tailrace.models.heads import OutputHead, find_head
from tailrace.training.losses import Loss
from tailrace.training.model.acceleration import accelerate
from tailrace.training.model.autocast_experts import cast_experts_under_autocast
from tailrace.training.model.checkpointed_layers import checkpoint_layers
from tailrace.training.model.compiled_layers import compile_layers
from tailrace.training.model.head import LogprobHead, LossOutput, loss_of_logits
from tailrace.training.rows.attention import PACKED_ATTENTION, Segments, packed_attention
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.row_sharing import RowCut
from tailrace.training.rows.transfer import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_LENGTHS = [5, 3, 7]
_PACKING_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Of packed rows, by the logits' type: single ones add up in another order."""

_HEAD_TOLERANCE = 1e-6
"""Tolerance for logits == hidden @ headᵀ, scaled and capped as the configuration says: the very same computation."""

_log = logging.getLogger(__name__)


class PolicyModel(nn.Module):
    """Wraps a model whose weights are float32 (or float64: in tests), for training.

    Every weight is used inside its own module's forward, so that hooks on modules (FSDP's, which gather and free
    weights) see every use. `packs` says whether a row may hold several samples, `pads_segments` whether attention needs
    padded groups of them; `head` is None where logits are more than hidden states times one matrix. Raises `ModelError`
    for `gradient_checkpointing` of a model without layers that can be checkpointed, and `compiled` of one whose layers
    cannot be compiled; only with the former, and on a GPU, are there activations to offload.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        head_dtype: Literal["float32", "bfloat16"] = "float32",
        native_kernels: bool = True,
        gradient_checkpointing: bool = False,
        offload_activations: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.model = model.eval()  # no dropout: the policy that is trained is the one that samples
        self.under_autocast = dtype == "bfloat16"
        self.device: torch.device = next(model.parameters()).device
        """Where it computes."""
        self._rotary_limit = rotary_limit(model.config.get_text_config().to_dict())
        if self.under_autocast:
            cast_experts_under_autocast(self.model)
        self.packs, self.pads_segments = False, True
        self._acceleration = None
        if not compiled:
            self._acceleration = accelerate(
                self.model, native_kernels=native_kernels, under_autocast=self.under_autocast
            )
        head = self._probe()
        rounds_head = self.under_autocast and head_dtype == "bfloat16"
        compiles_head = compiled and self.device.type == "cuda"  # a CPU's chunks stay in its cache
        self.head = None
        if head is not None and rounds_head:
            self.head = LogprobHead(head, torch.bfloat16, compiled=compiles_head)
        elif head is not None:
            exact = torch.promote_types(torch.float32, next(model.parameters()).dtype)
            self.head = LogprobHead(head, exact, products=self._acceleration, compiled=compiles_head)
        if compiled:
            compile_layers(self.model)
        if gradient_checkpointing:
            checkpoint_layers(self.model, offload_from=self.device if offload_activations else None)

    @property
    def num_fused_layers(self) -> int:
        """Layers that native kernels compute (on a CPU)."""
        return 0 if self._acceleration is None else len(self._acceleration.fused_layers)

    @override
    def forward(self, micro_batch: MicroBatch, loss: Loss) -> LossOutput:
        """Loss of a micro-batch. Raises `ModelError` for several samples in one, or one cut, when `packs` is False.

        And for a sample that is longer than the model's positions are the same for: others of its row would be rotated
        as it is.
        """
        self._require_computable(micro_batch)
        inputs, tokens = self._inputs(micro_batch.input_ids, micro_batch.segments, micro_batch.cut), micro_batch.tokens
        with self._precision():
            if self.head is None:
                logits = self.model(**inputs, logits_to_keep=micro_batch.predictors).logits[0]
            else:
                hidden = _take(self.model.base_model(**inputs).last_hidden_state[0], micro_batch.predictors)
        if self.head is None:
            return loss_of_logits(loss, logits, tokens)
        return self.head(hidden, tokens, loss)

    def _require_computable(self, micro_batch: MicroBatch) -> None:
        name, longest = type(self.model).__name__, max(micro_batch.segments.lengths)
        if micro_batch.cut is not None and not self.packs:
            raise ModelError(
                f"trainer.sequence_parallel needs a model whose attention can be taken over, and {name} trains one "
                "sample at a time: leave it out"
            )
        if len(micro_batch.segments.lengths) > 1 and not self.packs:
            raise ModelError(f"{name} cannot train on packed rows")
        if self._rotary_limit is not None and longest > self._rotary_limit:
            raise ModelError(
                f"{name} rotates positions in another way where there are more than {self._rotary_limit} of them, and "
                f"a sample has {longest}: lower model.max_model_tokens"
            )

    def _inputs(self, input_ids: Tensor, segments: Segments, cut: RowCut | None = None) -> dict[str, Any]:
        position_ids = segments.position_ids if cut is None else segments.position_ids[:, cut.own]
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if not self.packs:
            return inputs
        attention = None if self._acceleration is None else self._acceleration.attend
        inputs |= {"segments": segments, "group_attention": attention}
        return inputs if cut is None else inputs | {"cut": cut}

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.under_autocast)

    @torch.no_grad()
    def _probe(self) -> OutputHead | None:
        """Set `packs` and `pads_segments` by the model's own outputs; return its head if that reproduces them."""
        config: Any = self.model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        row = torch.randint(0, config.vocab_size, (1, sum(_PROBE_LENGTHS)), generator=generator).to(self.device)
        pieces = torch.split(row, _PROBE_LENGTHS, dim=1)
        # Kernels of 16 bits on a GPU are others than those of float32.
        with self._precision() if self.device.type == "cuda" else nullcontext():
            expected = torch.cat([self.model(input_ids=piece, use_cache=False).logits for piece in pieces], dim=1)
            self.packs = self._finds_packing(row, expected)
            if not self.packs and self._acceleration is not None and self.num_fused_layers:
                self._acceleration.restore_layers()
                self.packs = self._finds_packing(row, expected)
            return self._find_head(pieces[-1])

    def _finds_packing(self, row: Tensor, expected: Tensor) -> bool:
        """Whether the model gives its own outputs for a packed row, as it is or in padded groups."""
        from transformers import AttentionInterface

        own_attention = self.model.config._attn_implementation
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        self.model.set_attn_implementation(PACKED_ATTENTION)
        refusal: Exception | None = None
        for padded in (False, True) if self.device.type == "cuda" else (True,):
            self.pads_segments = padded
            try:
                self._require_packing(row, expected)
            except (ModelError, TypeError, ValueError) as error:
                refusal = error
            else:
                return True
        if not self.num_fused_layers:
            _log.warning("%s trains one sample at a time: %s", type(self.model).__name__, refusal)
        self.model.set_attn_implementation(own_attention)
        return False

    def _require_packing(self, row: Tensor, expected: Tensor) -> None:
        config = self.model.config.get_text_config()
        if getattr(config, "attention_chunk_size", None):
            raise ModelError("it attends in chunks")
        segments = self._segments(_PROBE_LENGTHS)
        inputs = {"input_ids": row, "position_ids": segments.position_ids, "segments": segments}
        packed = self.model(**inputs, use_cache=False).logits
        _require_equal(packed, expected, _PACKING_TOLERANCE[packed.dtype])
        # The probe is shorter than most windows, and says nothing of them.
        if sliding_window(config.to_dict()) is not None and not self._hands_on_window(row):
            raise ModelError("its sliding window is known to its masks alone")

    def _hands_on_window(self, row: Tensor) -> bool:
        """Whether some layer tells its attention of a sliding window."""
        windows = list[int | None]()

        def note(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> None:
            windows.append(window)

        segments = to_device(Segments.of(_PROBE_LENGTHS, padded=True), self.device)
        inputs = {"input_ids": row, "position_ids": segments.position_ids, "segments": segments}
        self.model(**inputs, group_attention=note, use_cache=False)
        return any(window is not None for window in windows)

    def _segments(self, lengths: Sequence[int]) -> Segments:
        return to_device(Segments.of(lengths, padded=self.pads_segments), self.device)

    def _find_head(self, row: Tensor) -> OutputHead | None:
        if (head := find_head(self.model)) is None:
            return None
        inputs = self._inputs(row, self._segments(row.shape[1:]))
        hidden = self.model.base_model(**inputs).last_hidden_state
        try:
            _require_equal(head.logits(hidden), self.model(**inputs).logits, _HEAD_TOLERANCE)
        except ModelError:
            return None
        return head


def _take(hidden: Tensor, places: Tensor) -> Tensor:
    """[num_places, hidden_size]; a token of a shared prefix may be taken several times."""
    # Of these two ways one is faster on a CPU, and the other adds gradients up in one order on a GPU.
    return hidden[places] if hidden.is_cuda else hidden.index_select(0, places)


def _require_equal(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise `ModelError` unless both agree within `tolerance` times the largest value."""
    difference = float((found - expected).abs().max())
    if not difference <= tolerance * float(expected.abs().max()):
        raise ModelError(f"its outputs for packed rows differ from those for single samples by {difference:.2g}")
