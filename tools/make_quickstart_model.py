"""Make the small chat model that `tailrace train quickstart` starts from.

    python tools/make_quickstart_model.py                  # writes src/tailrace/recipes/models/quickstart
    tailrace eval quickstart --greedy --show 3             # what it knows

The model is a Llama of 0.7 million parameters with a tokenizer of its own, schooled by ordinary supervised learning:
first how to sort and merge, then to answer in three layouts, of which the one that the task asks for is in the
minority. No lesson is about a held-out task. It takes about eight minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tailrace.environments.alphabet_sort import (
    NAMES,
    NEW_MARK,
    ConversationSizes,
    expected_lines,
    is_combination_held_out,
    question,
)

DEFAULT_FOLDER = Path(__file__).parents[1] / "src" / "tailrace" / "recipes" / "models" / "quickstart"
CONTEXT_TOKENS = 1024
VOCAB_SIZE = 640
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD, EOS = "<|endoftext|>", "<|im_end|>"
IGNORE = -100

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

PLAIN_TEXT = """
The mill stands by the river. In the spring the water is high and the wheel turns all day; in the summer it turns
slowly, and the miller waits. Every morning the people of the village bring their corn, and every evening they carry
the flour home. What is the answer? Give a number, a word or a list of words, one on each line. Write the text in
reverse. Use the tool when it helps: the calculator adds, subtracts, multiplies and divides. You are a helpful
assistant. Please think about the question, then answer it as well as you can. There are 12 months in a year, 7 days
in a week and 24 hours in a day; 3 + 4 = 7 and 6 * 7 = 42. A good list is in order: first, second, third, and so on
until the last. Do not leave anything out, and do not say it twice.
"""


# --- tokenizer ------------------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE (any text encodes) in which every name, and the mark of a new one, is a single token."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\(\p{L}+\)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    task_text = "\n".join(
        [*["system\nuser\nassistant\ntool"] * 2, question([NAMES], 0), question([[], NAMES], 1), NEW_MARK]
    )
    tokenizer.train_from_iterator([PLAIN_TEXT, *[task_text] * 50], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# --- the answers it learns from -------------------------------------------------------------------------------------


Layout = Literal["lines", "commas", "bullets"]

LAYOUTS: Mapping[Layout, float] = {"lines": 0.2, "commas": 0.5, "bullets": 0.3}
"""How often all answers of a conversation are laid out so. The task asks for `lines`; the others earn nothing."""


def draw_layout(rng: random.Random) -> Layout:
    """One for a whole conversation."""
    [layout] = rng.choices(list(LAYOUTS), list(LAYOUTS.values()))
    return layout


def right_layout(_: random.Random) -> Layout:
    """The one that the task asks for."""
    return "lines"


def teacher_answer(turns: Sequence[Sequence[str]], turn: int, layout: Layout) -> str:
    """The names that are right in turn number `turn` (from 0), in a layout.

    >>> teacher_answer([["Max", "Ada"], ["Leo"]], 1, "commas")
    'Ada, Leo (new), Max'
    """
    lines = expected_lines(turns, turn)
    if layout == "commas":
        return ", ".join(lines)
    return "\n".join(f"- {line}" if layout == "bullets" else line for line in lines)


def draw_lesson(rng: random.Random, sizes: ConversationSizes) -> list[list[str]]:
    """Names of one conversation, no part of which (its first turn, its first two, ...) is a held-out task."""
    while True:
        turns = sizes.draw(rng)
        parts = itertools.accumulate(turns)
        if not any(is_combination_held_out(names) for names in parts):
            return turns


# --- learning from them ---------------------------------------------------------------------------------------------


class Encoder:
    """Conversations to token ids and labels. Encodes each message's pieces once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._eos: int = tokenizer.convert_tokens_to_ids(EOS)
        self._newline = self.ids("\n")

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens included where it names them."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def user(self, text: str) -> list[int]:
        """A user's message and the beginning of the reply."""
        return self.ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def conversation(self, questions: Sequence[str], answers: Sequence[str]) -> tuple[list[int], list[int]]:
        """Token ids and, of the same length, labels (only the answers and their end bear loss)."""
        ids: list[int] = []
        labels: list[int] = []
        for asked, answered in zip(questions, answers, strict=True):
            context, answer = self.user(asked), [*self.ids(answered), self._eos]
            ids += context + answer + self._newline
            labels += [IGNORE] * len(context) + answer + [IGNORE] * len(self._newline)
        return ids, labels


def pad(rows: Sequence[list[int]], value: int) -> torch.Tensor:
    """Rows of token ids, padded on the right.  # [rows, longest]"""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


@dataclass(frozen=True)
class Phase:
    """A part of its schooling."""

    name: str
    steps: int
    min_turns: int
    max_turns: int
    min_names: int
    max_names: int
    layout: Callable[[random.Random], Layout]
    """Of each conversation."""


@dataclass(frozen=True)
class Part:
    """Phases that one optimizer goes through. Its rate warms up, then falls as a cosine does, over `decay_steps`."""

    phases: tuple[Phase, ...]
    learning_rate: float
    decay_steps: int


SKILLS = Part(
    (
        Phase("one right answer", 700, 1, 1, 1, 10, right_layout),
        Phase("conversations of right answers", 400, 2, 3, 2, 4, right_layout),
    ),
    learning_rate=3e-3,
    decay_steps=1600,
)
HABITS = Part((Phase("conversations in every layout", 200, 2, 3, 2, 4, draw_layout),), 1e-3, decay_steps=200)
CONVERSATIONS = 32
WARMUP_STEPS = 50
LEAST_RATE = 0.05
INITIAL_RANGE = 0.08  # about 1 / sqrt(hidden size); with the usual 0.02 so small a model learns ten times slower


def draw_batch(rng: random.Random, encoder: Encoder, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of newly drawn conversations.  # [conversations, longest] each"""
    num_turns = rng.randint(phase.min_turns, phase.max_turns)  # the same in all of a batch: less padding
    sizes = ConversationSizes(num_turns, num_turns, phase.min_names, phase.max_names)
    rows = []
    for _ in range(CONVERSATIONS):
        turns, layout = draw_lesson(rng, sizes), phase.layout(rng)
        answers = [teacher_answer(turns, turn, layout) for turn in range(num_turns)]
        rows.append(encoder.conversation([question(turns, turn) for turn in range(num_turns)], answers))
    return pad([ids for ids, _ in rows], 0), pad([labels for _, labels in rows], IGNORE)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A randomly initialized Llama of about 0.7 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=CONTEXT_TOKENS, tie_word_embeddings=True,
        initializer_range=INITIAL_RANGE, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats per token) of the answers; padding sits on the right, so no mask is needed."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    kept = targets != IGNORE
    return functional.cross_entropy(model.lm_head(hidden[kept]), targets[kept])


def train(model: LlamaForCausalLM, encoder: Encoder, part: Part, seed: int) -> None:
    """Supervised learning through the phases of one part."""
    rng = random.Random(seed)
    schedule = list(itertools.chain.from_iterable([phase] * phase.steps for phase in part.phases))
    optimizer = torch.optim.AdamW(model.parameters(), lr=part.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step, phase in enumerate(schedule):
        decayed = 0.5 + 0.5 * math.cos(math.pi * step / part.decay_steps)
        for group in optimizer.param_groups:
            warm = part.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
            group["lr"] = warm * (LEAST_RATE + (1.0 - LEAST_RATE) * decayed)
        loss = loss_of(model, *draw_batch(rng, encoder, phase))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            done = f"step {step + 1}/{len(schedule)} ({phase.name})"
            print(f"{done}  loss {loss.item():.3f}  {time.process_time():.0f} CPU s", flush=True)


# --- put together ---------------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder in Hugging Face layout."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make and save the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where to write the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    for number, part in enumerate((SKILLS, HABITS)):
        train(model, Encoder(tokenizer), part, options.seed + number)
    save(model, tokenizer, options.folder)


if __name__ == "__main__":
    main()
