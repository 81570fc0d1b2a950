"""Bytes that one step puts on each link, by arithmetic: the table of docs/scaling.md.

    python benchmarks/link_bytes.py

Nothing is run, and nothing of it is measured here. What a token, a message and a changed weight take is known from
the formats (docs/data-plane.md) and from what was measured of them; a model is its counts.
"""

from __future__ import annotations

from dataclasses import dataclass

REQUEST_BYTES, REQUEST_TOKEN_BYTES = 284, 4
"""Of a call of `generate` as msgpack, and of each token of its prompt: int32."""
REPLY_BYTES, REPLY_TOKEN_BYTES = 271, 12
"""Of its answer, and of each sampled token: id int32, log-probability float32, policy version int32."""
LOGPROB_BYTES = 4
BATCH_TOKEN_BYTES = 13
"""Of each token of a batch: what a reply has, and whether the token bears loss."""
EVENT_BYTES = 164 + 2364
"""Of a step in the event log: `ModelStateDictPublished`, and `StepTrained` with its metrics."""
CHANGED_BFLOAT16, CHANGED_FLOAT32 = 0.015, 0.51
"""What a delta has of the bytes of weights of either type, as docs/data-plane.md found them for a real model."""


@dataclass(frozen=True)
class Model:
    """What matters of a model for its links."""

    name: str
    parameters: int
    embedding_parameters: int
    """Embeddings and head, which are published in float32 where all else is bfloat16."""
    gpus_per_generator: int
    expert_layers: int = 0
    num_experts: int = 0
    top_k: int = 0

    @property
    def bfloat16_bytes(self) -> int:
        return 2 * (self.parameters - self.embedding_parameters)

    @property
    def float32_bytes(self) -> int:
        return 4 * self.embedding_parameters

    @property
    def routing_bytes(self) -> int:
        """Of one token: the experts of all layers, uint8 up to 256 of them, else uint16."""
        return self.expert_layers * self.top_k * (1 if self.num_experts <= 256 else 2)


@dataclass(frozen=True)
class Load:
    """One step, and who generates for it. Rollouts have one turn."""

    rollouts: int = 4096
    prompt_tokens: int = 1_000
    completion_tokens: int = 8_000
    generating_gpus: int = 768


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of one step."""

    whole_weights: int
    """Into the store, and from it to each generator of its host or of its folder."""
    delta: int
    """To each generator of another host."""
    whole_to_all: int
    deltas_to_all: int
    requests: int
    replies: int
    logprobs: int
    """Part of the replies, and of the batch."""
    batch: int
    """To the trainer's ranks together."""
    routed_experts: int
    events: int


def link_bytes(model: Model, load: Load) -> LinkBytes:
    """Bytes on each link.

    >>> found = link_bytes(QWEN3_8B, Load())
    >>> found.whole_weights == 2 * 6_946_075_648 + 4 * 1_244_659_712
    True
    >>> found.batch == 4096 * 9_000 * 13
    True
    >>> link_bytes(QWEN3_235B, Load()).routed_experts == 4096 * 8_999 * 94 * 8
    True
    >>> link_bytes(KIMI_K2, Load()).routed_experts == 4096 * 8_999 * 60 * 8 * 2
    True
    """
    tokens = load.rollouts * (load.prompt_tokens + load.completion_tokens)
    sampled = load.rollouts * load.completion_tokens
    generators = load.generating_gpus // model.gpus_per_generator
    whole = model.bfloat16_bytes + model.float32_bytes
    delta = round(CHANGED_BFLOAT16 * model.bfloat16_bytes + CHANGED_FLOAT32 * model.float32_bytes)
    return LinkBytes(
        whole_weights=whole,
        delta=delta,
        whole_to_all=generators * whole,
        deltas_to_all=generators * delta,
        requests=load.rollouts * (REQUEST_BYTES + REQUEST_TOKEN_BYTES * load.prompt_tokens),
        replies=load.rollouts * REPLY_BYTES + REPLY_TOKEN_BYTES * sampled,
        logprobs=LOGPROB_BYTES * sampled,
        batch=BATCH_TOKEN_BYTES * tokens,
        routed_experts=(tokens - load.rollouts) * model.routing_bytes,  # the last token was never forwarded
        events=EVENT_BYTES,
    )


QWEN3_8B = Model("8B dense (Qwen3-8B)", 8_190_735_360, 2 * 151_936 * 4_096, 1)
QWEN3_235B = Model("235B (Qwen3-235B-A22B)", 235_093_634_560, 2 * 151_936 * 4_096, 8, 94, 128, 8)
KIMI_K2 = Model("1T (Kimi K2)", 1_026_400_000_000, 2 * 163_840 * 7_168, 8, 60, 384, 8)
MODELS = (QWEN3_8B, QWEN3_235B, KIMI_K2)

ROWS = {
    "whole_weights": "weights, whole: trainer to store, store to a generator",
    "delta": "the same as a delta: to a generator of another host",
    "whole_to_all": "weights, whole: to the generators of all 768 GPUs",
    "deltas_to_all": "the same as deltas",
    "requests": "requests: orchestrator to generators",
    "replies": "replies: generators to orchestrator",
    "logprobs": "log-probabilities, a part of the replies",
    "batch": "batch: orchestrator to all ranks together",
    "routed_experts": "routed experts: generators to store, store to ranks",
    "events": "events: trainer to orchestrator",
}


def shown(count: int) -> str:
    """A number of bytes to three digits.

    >>> [shown(count) for count in (0, 2528, 479_232_000, 18_870_790_144)]
    ['–', '2.53 kB', '479 MB', '18.9 GB']
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            value = count / size
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{count} B" if count else "–"


def table(load: Load) -> list[str]:
    """Lines of Markdown."""
    found = [link_bytes(model, load) for model in MODELS]
    lines = ["| link | " + " | ".join(model.name for model in MODELS) + " |", "| --- |" + " ---: |" * len(MODELS)]
    for name, label in ROWS.items():
        lines.append(f"| {label} | " + " | ".join(shown(getattr(one, name)) for one in found) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(Load())))
