"""The benchmarks' models: a small Qwen3 with a tokenizer and a chat template of its own, and a Llama like SmolLM2.

Random weights, so that the Qwen3's lengths are set by one number, the probability that a token is the last one. A
constant is put into the first element of every embedding; after the last norm it still stands there, positive, and the
embedding of the end token (the head's row, since they are tied) weighs it more or less than those of the other tokens
do. So the end comes with nearly the same probability at every position, whatever the context, and lengths are
geometric, cut at the cap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
PAD_ID, END_ID = 0, 2
CONTEXT_TOKENS = 1024

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The shape of a Qwen3; the defaults make 3.4 million parameters."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    key_value_heads: int = 2
    vocabulary: int = 1024


def make_model(size: ModelSize, seed: int = 0) -> Qwen3ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=END_ID,
        bos_token_id=None,
        pad_token_id=PAD_ID,
    )
    return Qwen3ForCausalLM(config).eval()


SMOLLM2_VOCABULARY = 49152


def make_smollm2(layers: int = 30) -> LlamaForCausalLM:
    """Random weights in SmolLM2's shape: 135 million parameters with all 30 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SMOLLM2_VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def set_end_probability(model: Qwen3ForCausalLM, probability: float) -> None:
    """Make the end token come with this probability, on average over random contexts (see the module)."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[:, 0] = 0.5
        low, high = -40.0, 40.0
        for _ in range(30):
            weight[END_ID] = weight.mean(0)
            weight[END_ID, 0] = (low + high) / 2
            low, high = ((low + high) / 2, high) if _end_probability(model) < probability else (low, (low + high) / 2)


def _end_probability(model: Qwen3ForCausalLM) -> float:
    ids = torch.randint(3, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(1))
    return float(model(input_ids=ids).logits.softmax(-1)[:, :, END_ID].mean())


def make_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`, filled up to the size of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "user\nassistant\n"], trainer)
    missing = vocabulary - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"word{index}" for index in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[END_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """In the layout that `from_pretrained` loads."""
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def school(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Sequence[Mapping[str, str]],
    *,
    steps: int = 100,
    batch: int = 32,
    learning_rate: float = 2e-3,
) -> None:
    """Ordinary supervised learning of `prompt` → `answer`, for too short a time to master it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    rows = [_lesson(tokenizer, lesson) for lesson in lessons]
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        chosen = [rows[index] for index in torch.randint(len(rows), (batch,), generator=generator).tolist()]
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.full((batch, longest), PAD_ID)
        labels = torch.full((batch, longest), -100)
        for place, (row, prompt) in enumerate(chosen):
            ids[place, : len(row)] = torch.tensor(row)
            labels[place, prompt : len(row)] = ids[place, prompt : len(row)]
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _lesson(tokenizer: PreTrainedTokenizerFast, lesson: Mapping[str, str]) -> tuple[list[int], int]:
    """Token ids of prompt and answer, and how many of them are the prompt's."""
    messages = [{"role": "user", "content": lesson["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    return ids + tokenizer(lesson["answer"], add_special_tokens=False).input_ids + [END_ID], len(ids)
