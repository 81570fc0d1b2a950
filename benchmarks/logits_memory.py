"""What the trainer's head holds of logits at once: the most bytes of tensors as wide as the vocabulary."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.models.heads import OutputHead
from tailrace.training.losses import LossTokens, load_loss
from tailrace.training.model.head import LogprobHead
from tailrace.training.settings.trainer import TrainerSettings

HIDDEN = 64
VOCABULARIES = (1024, 151_936)
ROWS = (1024, 4096, 16_384)


@dataclass(frozen=True)
class LogitsRow:
    """Forward and backward of the head, float32."""

    case: str
    loss: str
    vocabulary: int
    row_tokens: int
    peak_logits_bytes: int
    whole_logits_bytes: int
    """Of one copy of all logits of the row."""
    met: bool
    """As many as for the shortest row that fills a chunk."""


class LogitsWatch(TorchDispatchMode):
    """The most bytes that tensors of the vocabulary's width took at once, the head's own shape left out."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._vocabulary = vocabulary
        self._holders: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary:
                self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        self._holders[place] += 1
        self._bytes[place] = storage.nbytes()
        weakref.finalize(tensor, self._release, place)
        self.peak_bytes = max(self.peak_bytes, sum(self._bytes.values()))

    def _release(self, place: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._bytes[place]


def logits_rows(*, quick: bool) -> list[LogitsRow]:
    """Of a loss that knows its derivative and of one that does not."""
    rows = []
    for vocabulary in VOCABULARIES:
        for name in ("clipped_ratio",) if quick else ("clipped_ratio", "gspo"):
            peaks = [peak_logits_bytes(name, vocabulary, tokens) for tokens in (ROWS[:2] if quick else ROWS)]
            rows += [
                LogitsRow("logits", name, vocabulary, tokens, peak, 4 * vocabulary * tokens, peak <= peaks[0])
                for tokens, peak in zip(ROWS, peaks, strict=False)
            ]
    return rows


def peak_logits_bytes(loss_name: str, vocabulary: int, num_tokens: int) -> int:
    linear = nn.Linear(HIDDEN, vocabulary, bias=False)
    head = LogprobHead(OutputHead(linear), torch.float32)
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    tokens = LossTokens(
        targets=torch.randint(0, vocabulary, (num_tokens,)),
        logprobs=torch.full((num_tokens,), -5.0),
        advantages=torch.randn(num_tokens),
        temperatures=torch.ones(num_tokens),
        policy_versions=torch.zeros(num_tokens, dtype=torch.int32),
        sample_offsets=torch.tensor([0, num_tokens]),
    )
    loss = load_loss(TrainerSettings.model_validate({"loss": {"name": loss_name}}).loss)
    with LogitsWatch(vocabulary) as watch:
        head(hidden, tokens, loss).total.backward()
    return watch.peak_bytes
