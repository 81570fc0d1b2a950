"""What every engine promises, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from tailrace.errors import EngineFailed, RequestRefused, SettingsError
from tailrace.generation.settings import CONTEXT_IS
from tailrace.records import (
    ExpertArray,
    FinishReason,
    Float32Array,
    GenerationRequest,
    Int32Array,
    RequestId,
    Supports,
    TokenScores,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """A chunk of one request's tokens: at its finish, or every `chunk_tokens`. Arrays are [num_tokens]."""

    request_id: RequestId
    token_ids: Int32Array
    logprobs: Float32Array
    """Of the distribution that each token was really sampled from, in nats."""
    policy_versions: Int32Array
    """The version installed when the forward pass that sampled the token was launched."""
    mixed_cache_tokens: int = 0
    """How many of these tokens, the last ones, were sampled over keys and values that older weights had a part in."""
    finish_reason: FinishReason | None = None
    """Set on the request's last chunk."""
    routed_experts: ExpertArray | None = None
    """On the last chunk of a request with an `owner`, where the engine was asked for it: [positions, layers with
    experts, top_k], for positions of prompt and completion from `routed_experts_start` on, all that the request's
    session was not handed before. Never with the last token, which no forward pass has seen.
    """
    routed_experts_start: int = 0
    supports: Supports | None = None
    """What each token was sampled from, where `sampling.returns_supports` asks and top-p or top-k restrict it."""
    scores: TokenScores | None = None
    """Of the prompt's tokens, on the last chunk of a request with `score_top_k`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """On the last chunk: those of `request_metrics`. `nonfinite_logprobs` are of tokens that the engine left out."""


class EngineCounts(msgspec.Struct, kw_only=True):
    """What an engine counts from its start."""

    steps_total: int = 0
    sampled_tokens_total: int = 0
    prefilled_tokens_total: int = 0
    """Prompt tokens that went through the model."""


class EngineStatistics(EngineCounts, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec allows it
    """A snapshot of an engine. The generator counts loads."""

    policy_version: int
    """Version of the installed model state dict."""
    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests accepted and without a slot."""
    running_tokens: int = 0
    """Tokens of the running requests, prompts included."""
    kv_tokens: int
    """Tokens whose keys and values are cached."""
    kv_capacity_tokens: int
    loads_total: int = 0
    """Model state dicts installed."""


def request_metrics(
    now_s: float,
    *,
    added_s: float,
    started_s: float,
    first_token_s: float,
    cached_prompt_tokens: int = 0,
    preemptions: int = 0,
    nonfinite_logprobs: int = 0,
) -> dict[str, float]:
    """`SampledTokens.metrics` of a request that ends now; times are 0 for what did not happen."""
    first_token_s = first_token_s or now_s
    return {
        "queue_s": (started_s or now_s) - added_s,
        "time_to_first_token_s": first_token_s - added_s,
        "decode_s": now_s - first_token_s,
        "cached_prompt_tokens": float(cached_prompt_tokens),
        "preemptions": float(preemptions),
        "nonfinite_logprobs": float(nonfinite_logprobs),
    }


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can be asked for."""

    vocab_size: int
    max_model_tokens: int
    """Prompt and completion together."""
    returns_supports: bool = False
    """Whether it can tell what top-p and top-k left of the vocabulary."""
    returns_experts: bool = False
    """Whether its completions name the experts that its routers chose."""
    scores_prompts: bool = False
    """Whether it takes requests with `score_top_k`."""
    guides: bool = False
    """Whether it takes requests with `sampling.json_schema`."""
    highest_temperature: float = math.inf

    def require_acceptable(self, request: GenerationRequest, running: Container[str] = ()) -> None:
        """Raise `RequestRefused`, naming the request, for one that no engine with these limits can serve,
        or whose id is `running`.
        """
        name = f"request {request.request_id}"
        if request.request_id in running:
            raise RequestRefused(f"{name} is running already; request ids must be unique")
        try:
            request.sampling.require_valid()
        except SettingsError as error:
            raise RequestRefused(f"{name}: {error}") from error
        if request.sampling.temperature > self.highest_temperature:
            raise RequestRefused(
                f"{name}: sampling.temperature is {request.sampling.temperature:g}; this engine takes "
                f"{self.highest_temperature:g} at most"
            )
        if request.sampling.returns_supports and request.sampling.restricts and not self.returns_supports:
            raise RequestRefused(f"{name} is for training with top-p or top-k: {NO_SUPPORTS}")
        if request.sampling.json_schema is not None and not self.guides:
            raise RequestRefused(
                f"{name} asks for JSON of a schema, and this engine does not guide decoding: generator.engine = 'vllm' "
                "does; or ask for the form in the prompt"
            )
        if request.score_top_k is not None and not self.scores_prompts:
            raise RequestRefused(f"{name} asks for scores of its tokens, which this engine does not give")
        if len(request.prompt_token_ids) == 0:
            raise RequestRefused(f"{name} has an empty prompt; it must hold one token at least")
        context = request.context_token_ids
        if len(context) + 1 > self.max_model_tokens:
            raise RequestRefused(
                f"{name} has {len(context)} tokens before the first new one; the context holds "
                f"{self.max_model_tokens}, one of which must be left ({CONTEXT_IS})"
            )
        if request.prefix_tokens >= request.sampling.max_tokens:
            raise RequestRefused(
                f"{name} has sampled {request.prefix_tokens} of sampling.max_tokens = {request.sampling.max_tokens} "
                "already"
            )
        if context.min() < 0 or context.max() >= self.vocab_size:
            stranger = int(context[(context < 0) | (context >= self.vocab_size)][0])
            raise RequestRefused(f"{name} holds token id {stranger}; the vocabulary's are 0 to {self.vocab_size - 1}")


NO_SUPPORTS = (
    "the engine does not return which tokens they kept, and probabilities over the whole vocabulary are not those that "
    "it sampled from"
)
"""Why top-p and top-k are refused where rollouts are trained on."""

FailureListener: TypeAlias = Callable[[EngineFailed], None]
"""Called from any thread when an engine can never step again."""


class Engine(Protocol):
    """Synchronous, and owned by the one thread that builds, steps and closes it."""

    @property
    def limits(self) -> EngineLimits:
        """What a request must respect."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do or return anything."""

    def watch(self, on_failure: FailureListener) -> None:
        """Report at once when the engine ends by itself, idle or in a step: a process or a rank of it died."""

    def add(self, request: GenerationRequest) -> None:
        """Accept a request. Raises `RequestRefused` for an impossible one, or one whose id is running; others go on."""

    def step(self) -> list[SampledTokens]:
        """Advance by one iteration: any number of requests may advance or finish."""

    def abort(self, request_id: str) -> None:
        """End a request; its last chunk says `ABORTED`. Unknown ids (it may just have finished) are ignored."""

    def reseed(self, seed: int) -> None:
        """Begin the random streams of requests that bring no seed again, at this one."""

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Do what of a load can be done while the engine steps; what `load_model_state_dict` is to be given.

        Called in another thread, for one model state dict after the other. Raises `ModelError`.
        """

    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Install new weights: copies, never aliases. Raises `ModelError`, and then the old ones are still whole;
        where they are not, `EngineFailed`. What was cached before is reused as `generator.kv_cache` says.
        """

    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        """Forget every cached key and value. Running requests are computed again from their tokens, by the weights of
        the next step (a load may come in between), or, if not `preempt_running`, make this raise `GenerationError`.
        """

    def statistics(self) -> EngineStatistics:
        """A snapshot."""

    def close(self) -> None:
        """Free the model and the cache."""
