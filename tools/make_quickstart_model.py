"""Make the small chat model that `tailrace train quickstart` starts from.

    python tools/make_quickstart_model.py                  # writes src/tailrace/recipes/models/quickstart

The model is a Llama of 0.7 million parameters with a tokenizer of its own, schooled by ordinary supervised learning.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tailrace.environments.alphabet_sort import (
    NAMES,
    NEW_MARK,
    ConversationSizes,
    alphabet_sort_tasks,
    expected_lines,
    is_combination_held_out,
    question,
    turn_reward,
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


@dataclass(frozen=True)
class Mistakes:
    """How often a teacher's answer goes wrong, drawn anew for each turn and each line."""

    order: float = 0.34
    """Of a turn: its names are not sorted."""
    marks: float = 0.34
    """Of a later turn: its marks are on no name, on all, or on names at random."""
    dropped: float = 0.03
    """Of a line: it is left out."""
    doubled: float = 0.03
    """Of a line: it is said twice."""
    swapped: float = 0.05
    """Of a line: it changes places with the next."""


def teacher_answer(rng: random.Random, turns: Sequence[Sequence[str]], turn: int, mistakes: Mistakes | None) -> str:
    """The right answer, or one with plausible mistakes."""
    if mistakes is None:
        return "\n".join(expected_lines(turns, turn))
    names = _order(rng, turns, turn, mistakes)
    new = _marked(rng, turns, turn, mistakes) if turn > 0 else set()
    lines: list[str] = []
    for name in names:
        line = name + NEW_MARK if name in new else name
        if rng.random() < mistakes.dropped and len(names) > 1:
            continue
        lines.extend([line, line] if rng.random() < mistakes.doubled else [line])
    for i in range(len(lines) - 1):
        if rng.random() < mistakes.swapped:
            lines[i], lines[i + 1] = lines[i + 1], lines[i]
    return "\n".join(lines)


def _order(rng: random.Random, turns: Sequence[Sequence[str]], turn: int, mistakes: Mistakes) -> list[str]:
    names = sorted(itertools.chain.from_iterable(turns[: turn + 1]))
    if rng.random() >= mistakes.order:
        return names
    style = rng.choice(["appended", "appended", "reversed", "shuffled"])
    if style == "appended":
        return sorted(itertools.chain.from_iterable(turns[:turn])) + list(turns[turn])
    if style == "reversed":
        return names[::-1]
    return rng.sample(names, len(names))


def _marked(rng: random.Random, turns: Sequence[Sequence[str]], turn: int, mistakes: Mistakes) -> set[str]:
    if rng.random() >= mistakes.marks:
        return set(turns[turn])
    names = list(itertools.chain.from_iterable(turns[: turn + 1]))
    style = rng.choice(["none", "all", "random"])
    return {"none": set(), "all": set(names), "random": {name for name in names if rng.random() < 0.5}}[style]


def draw_training_turns(rng: random.Random, sizes: ConversationSizes) -> list[list[str]]:
    """Names of one conversation that is not among the held-out combinations."""
    while True:
        turns = sizes.draw(rng)
        if not is_combination_held_out(list(itertools.chain.from_iterable(turns))):
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
    mistakes: Mistakes | None


PHASES = (
    Phase("one right answer", 700, 1, 1, 1, 10, None),
    Phase("conversations of right answers", 500, 2, 3, 2, 4, None),
    Phase("conversations with mistakes", 300, 2, 3, 2, 4, Mistakes()),
)
CONVERSATIONS = 32
LEARNING_RATE = 3e-3
INITIAL_RANGE = 0.08  # about 1 / sqrt(hidden size); with the usual 0.02 so small a model learns ten times slower


def draw_batch(rng: random.Random, encoder: Encoder, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of newly drawn conversations.  # [conversations, longest] each"""
    num_turns = rng.randint(phase.min_turns, phase.max_turns)  # the same in all of a batch: less padding
    sizes = ConversationSizes(num_turns, num_turns, phase.min_names, phase.max_names)
    rows = []
    for _ in range(CONVERSATIONS):
        turns = draw_training_turns(rng, sizes)
        answers = [teacher_answer(rng, turns, turn, phase.mistakes) for turn in range(num_turns)]
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


def train(model: LlamaForCausalLM, encoder: Encoder, seed: int) -> None:
    """Supervised learning through all phases."""
    rng = random.Random(seed)
    schedule = list(itertools.chain.from_iterable([phase] * phase.steps for phase in PHASES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step, phase in enumerate(schedule):
        decayed = 0.5 + 0.5 * math.cos(math.pi * step / len(schedule))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * decayed)
        loss = loss_of(model, *draw_batch(rng, encoder, phase))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            spent_s = time.monotonic() - started
            print(
                f"step {step + 1}/{len(schedule)} ({phase.name})  loss {loss.item():.3f}  {spent_s:.0f} s", flush=True
            )


# --- how good is it -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM, prompts: Sequence[list[int]], *, temperature: float, max_tokens: int, eos: int
) -> list[list[int]]:
    """One sampled answer (without its end) to each prompt, all in one batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=temperature > 0,
        temperature=temperature or 1.0, top_k=0, pad_token_id=0, eos_token_id=eos,
    )[:, longest:].tolist()  # fmt: skip
    return [list(itertools.takewhile(lambda token: token != eos, row)) for row in output]


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, num_tasks: int = 200, temperature: float = 1.0
) -> float:
    """Mean reward on the held-out tasks."""
    encoder = Encoder(tokenizer)
    rows = list(alphabet_sort_tasks(ConversationSizes(), held_out=True, seed=0, length=num_tasks))
    contexts: list[list[int]] = [[] for _ in rows]
    rewards: list[list[float]] = [[] for _ in rows]
    for turn in range(max(len(row["turns"]) for row in rows)):
        active = [i for i, row in enumerate(rows) if turn < len(row["turns"])]
        for i in active:
            contexts[i] += encoder.user(question(rows[i]["turns"], turn))
        answers = sample(
            model, [contexts[i] for i in active], temperature=temperature, max_tokens=64, eos=tokenizer.eos_token_id
        )
        for i, answer in zip(active, answers, strict=True):
            contexts[i] += [*answer, tokenizer.eos_token_id, *encoder.ids("\n")]
            rewards[i].append(turn_reward(tokenizer.decode(answer), rows[i]["expected"][turn]))
    return sum(sum(r) / len(r) for r in rewards) / len(rewards)


# --- put together ---------------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder in Hugging Face layout."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make, measure and save the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where to write the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, Encoder(tokenizer), options.seed)
    save(model, tokenizer, options.folder)
    torch.manual_seed(options.seed)
    print(f"held-out mean reward at temperature 1: {evaluate(model, tokenizer):.3f}")


if __name__ == "__main__":
    main()
