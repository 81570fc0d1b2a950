"""What one turn sampled."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tailrace.records.arrays import Float32Array, Int32Array
from tailrace.records.payload import PayloadChunk
from tailrace.records.scores import TokenScores
from tailrace.records.supports import Supports


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled (it is the last token)."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    ABORTED = "aborted"
    """Somebody asked the engine to abort it."""
    ERROR = "error"
    """The engine failed on this request alone."""
    RUNNING = "running"
    """It has not ended: said of a chunk that more tokens follow, never of a completion that `generate` returns."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What one turn sampled. Every array is [num_tokens]."""

    token_ids: Int32Array
    logprobs: Float32Array
    """Of the distribution that each token was really sampled from, in nats."""
    policy_versions: Int32Array
    """The version installed when the forward pass that sampled the token was launched."""
    finish_reason: FinishReason
    routed_experts: tuple[PayloadChunk, ...] = ()
    """Experts of prompt and completion, positions counted from the prompt's first token: one chunk for each request
    that had a part in it. Without an entry for the last token, which no forward pass has seen."""
    mixed_spans: tuple[tuple[int, int], ...] = ()
    """First token and end of each stretch sampled over keys and values that older weights had a part in, in order."""
    supports: Supports | None = None
    """What each token was sampled from, where `sampling.returns_supports` asked; None: the whole vocabulary."""
    scores: TokenScores | None = None
    """Of the prompt's tokens, where `score_top_k` asked."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`queue_s`, `time_to_first_token_s`, `decode_s`, `cached_prompt_tokens`, ...; JSON-friendly."""

    def __post_init__(self) -> None:
        if not (self.token_ids.shape == self.logprobs.shape == self.policy_versions.shape):
            raise ValueError(
                "a completion's arrays must be of one length, not "
                f"{self.token_ids.shape}, {self.logprobs.shape}, {self.policy_versions.shape}"
            )
        if self.supports is not None and self.supports.num_tokens != len(self.token_ids):
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens came with the supports of {self.supports.num_tokens}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return len(self.token_ids)
