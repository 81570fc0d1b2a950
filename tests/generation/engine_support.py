"""Small models with random weights, and the few lines that drive an engine by hand."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tailrace.generation.engines.protocol import Engine, SampledTokens
from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import Completion, FinishReason, GenerationRequest, SamplingParams, Supports

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True))


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4))


def _gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=12, attn_logit_softcapping=5.0)
    config._attn_implementation = "eager"  # the only one of transformers' that soft-caps
    return Gemma2ForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "gpt_neox": _gpt_neox,
    "gemma2": _gemma2,
}


def make_model(architecture: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return ARCHITECTURES[architecture]().eval()


EngineT = TypeVar("EngineT", bound=Engine)


class Brake:
    """Slows an engine down once it has sampled some tokens, until it is let go.

    What a test then does to a request that runs happens in its middle, however late the test gets to it: 200 tokens
    take 4 s, and no time at all once they need not wait any more.
    """

    STEP_S = 0.02

    def __init__(self, after_tokens: int = 4) -> None:
        self._after_tokens, self._let_go = after_tokens, threading.Event()

    def on(self, engine: EngineT) -> EngineT:
        step = engine.step

        def slowed() -> list[SampledTokens]:
            if engine.statistics().sampled_tokens_total >= self._after_tokens:
                self._let_go.wait(self.STEP_S)
            return step()

        engine.step = slowed  # type: ignore[method-assign]
        return engine

    def let_go(self) -> None:
        self._let_go.set()


def make_engine(model: PreTrainedModel, brake: Brake | None = None, **options: object) -> TorchEngine:
    """An engine over a copy of `model`, whose own attention stays as it is, to compare with."""
    engine = TorchEngine(copy.deepcopy(model), **{"slots": 4, **options})
    return engine if brake is None else brake.on(engine)


def request(
    name: str,
    prompt: Iterable[int],
    *,
    session: str | None = None,
    group: str | None = None,
    owner: str | None = "rollout",
    prefix: Completion | None = None,
    score_top_k: int | None = None,
    sampling: SamplingParams | None = None,
    **sampled: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        session_id=session or name,
        group_id=group or name,
        prompt_token_ids=np.asarray(list(prompt), np.int32),
        sampling=sampling or SamplingParams(**sampled),
        owner=owner,
        prefix=prefix,
        score_top_k=score_top_k,
    )


def assert_told(chunks: list[Completion], completion: Completion) -> None:
    """The chunks are the completion: every token once, in order, with its log-probability and version."""
    supports = [chunk.supports for chunk in chunks if chunk.supports is not None]
    if completion.supports is not None:
        assert Supports.concatenated(supports).token_ids.tolist() == completion.supports.token_ids.tolist()
    for column in ("token_ids", "logprobs", "policy_versions"):
        told = [value for chunk in chunks for value in getattr(chunk, column).tolist()]
        assert told == getattr(completion, column).tolist()
    assert all(chunk.num_tokens for chunk in chunks)


class Driver:
    """Steps an engine and puts the chunks of each request together."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.chunks: dict[str, list] = {}
        self.done: dict[str, Completion] = {}

    def step(self) -> None:
        for chunk in self.engine.step():
            chunks = self.chunks.setdefault(chunk.request_id, [])
            chunks.append(chunk)
            if chunk.finish_reason is not None:
                self.done[chunk.request_id] = Completion(
                    token_ids=np.concatenate([c.token_ids for c in chunks]),
                    logprobs=np.concatenate([c.logprobs for c in chunks]),
                    policy_versions=np.concatenate([c.policy_versions for c in chunks]),
                    finish_reason=FinishReason(chunk.finish_reason),
                    supports=Supports.concatenated([c.supports for c in chunks]) if chunk.supports else None,
                    scores=chunk.scores,
                    metrics=chunk.metrics | {"mixed_cache_tokens": sum(c.mixed_cache_tokens for c in chunks)},
                )

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def run(self, *requests: GenerationRequest) -> list[Completion]:
        for one in requests:
            self.engine.add(one)
        self.finish()
        return [self.done[one.request_id] for one in requests]


def prompts(count: int, seed: int = 0, longest: int = 45) -> list[list[int]]:
    """Ragged prompts, one of a single token among them."""
    generator = np.random.default_rng(seed)
    lengths = [1, *generator.integers(2, longest, count - 1).tolist()]
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def forward_logprobs(
    model: PreTrainedModel, context: list[int], token_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log-probabilities of a completion by one plain pass over everything."""
    logits = model(torch.tensor([[*context, *token_ids.tolist()]])).logits[0].float() / temperature
    predicted = logits.log_softmax(-1)[len(context) - 1 : -1]
    return predicted[torch.arange(len(token_ids)), torch.tensor(token_ids.tolist())].numpy()


@torch.no_grad()
def forward_logprobs_of_all(model: PreTrainedModel, context: list[int]) -> np.ndarray:
    """[vocabulary]: log-probabilities of what follows a context."""
    return model(torch.tensor([context])).logits[0, -1].float().log_softmax(-1).numpy()


@torch.no_grad()
def restricted_logprobs(
    model: PreTrainedModel, context: list[int], done: Completion, temperature: float = 1.0
) -> np.ndarray:
    """Log-probabilities of a completion by one plain pass, token by token over the support that came with it."""
    logits = model(torch.tensor([[*context, *done.token_ids.tolist()]])).logits[0].double() / temperature
    assert done.supports is not None
    ends = np.cumsum(done.supports.counts)
    found = []
    for place, (token_id, end, count) in enumerate(zip(done.token_ids, ends, done.supports.counts, strict=True)):
        support = done.supports.token_ids[end - count : end].tolist()
        assert token_id in support
        scores = logits[len(context) - 1 + place]
        found.append(float(scores[token_id] - scores[support].logsumexp(0)))
    return np.array(found)


@torch.no_grad()
def over_old_cache(
    old: PreTrainedModel, new: PreTrainedModel, prompt: list[int], done: Completion, boundary: int
) -> np.ndarray:
    """What `new` says of the tokens from `boundary` on, over keys and values that `old` made before."""
    seen = [*prompt, *done.token_ids.tolist()[: boundary - 1]]
    cache = old(torch.tensor([seen]), use_cache=True).past_key_values
    rest = torch.tensor([done.token_ids.tolist()[boundary - 1 :]])
    predicted = new(rest, past_key_values=cache).logits[0, :-1].log_softmax(-1)
    return predicted[torch.arange(len(rest[0]) - 1), rest[0, 1:]].numpy()
