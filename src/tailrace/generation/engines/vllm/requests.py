"""Our requests in vLLM's terms."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from tailrace.generation.decisions import KvCache
from tailrace.recent import RecentTable
from tailrace.records import GenerationRequest, SessionId

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses what is above."""


class PrefixSalts:
    """Which prefix cache a request may read: vLLM shares cached blocks only between requests of one salt.

    Under `keep` a session keeps the salt of the version that it began with, so that its later turns find its own older
    prefix; a new session never meets what older weights computed. Under the other rules nobody does.

    >>> salts = PrefixSalts()
    >>> salts.salt(SessionId("a"), version=0), salts.salt(SessionId("a"), version=1), salts.salt(SessionId("b"), 1)
    ('0.0', '0.0', '0.1')
    """

    def __init__(self, kv_cache: KvCache = "keep", *, share_across_versions: bool = False) -> None:
        self._kv_cache, self._share = kv_cache, share_across_versions
        self._sessions = RecentTable[SessionId, int]()
        self._epoch = 0

    def salt(self, session_id: SessionId, version: int) -> str:
        """The salt of the next request of a session."""
        if self._share:
            return f"{self._epoch}"
        if self._kv_cache != "keep":
            return f"{self._epoch}.{version}"
        began = self._sessions.get(session_id)
        if began is None:
            began = self._sessions[session_id] = version
        return f"{self._epoch}.{began}"

    def is_older(self, salt: str, version: int) -> bool:
        """Whether what lies under a salt may be of weights older than `version`."""
        return version > 0 if self._share else salt != f"{self._epoch}.{version}"

    def begin_again(self, session_id: SessionId) -> None:
        """The first request of a session has not run yet, and will begin with newer weights."""
        self._sessions.forget(session_id)

    def knows(self, session_id: SessionId) -> bool:
        """Whether an earlier request of the session left a prefix that is its own."""
        return session_id in self._sessions

    def renew(self) -> None:
        """From now on nobody finds what was cached so far."""
        self._epoch += 1
        self._sessions.clear()


def core_request(
    request: GenerationRequest,
    *,
    core_id: str,
    salt: str,
    experts_start: int = 0,
    adapter: LoRARequest | None = None,
) -> EngineCoreRequest:
    """What vLLM's engine core takes; an acceptable request is one that it accepts.

    Where routed experts are returned, they are those from position `experts_start` on.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=core_id,
        prompt_token_ids=request.context_token_ids.tolist(),
        mm_features=None,
        sampling_params=sampling_params(request, experts_start),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def sampling_params(request: GenerationRequest, experts_start: int = 0) -> VllmSamplingParams:
    """vLLM's sampling settings: the tokens that remain, the log-probability of the sampled token alone, no text."""
    from vllm import SamplingParams as VllmSamplingParams

    sampling = request.sampling
    sampled = request.prefix_tokens
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens - sampled,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=None if sampling.seed is None else _continued_seed(sampling.seed, sampled),
        logprobs=0,
        prompt_logprobs=request.score_top_k,
        ignore_eos=True,
        detokenize=False,
        routed_experts_prompt_start=experts_start,
    )


def _continued_seed(seed: int, sampled: int) -> int:
    """vLLM restarts a request's stream at its seed: one that goes on must not draw the same numbers again."""
    if sampled == 0:
        return seed % 2**63
    return int(np.random.SeedSequence([seed % 2**64, sampled]).generate_state(1, np.uint64)[0] >> np.uint64(1))
