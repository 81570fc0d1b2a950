"""TRL trains on what a run hands out: its own loss, optimizer and loop; everything before them is ours.

    tailrace train examples/external_trainer.toml
    .venv-trl/bin/python examples/external_trainer.py runs/outside    # beside it; `make bench-trl-env` installs TRL

Where GRPOTrainer would generate completions and score them, it pulls finished training samples instead. What it does
with them is its own affair; after each of its steps it leaves the weights in a folder and says so.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import tailrace
from tailrace.feed import Feed, FeedPlace, StreamedSample, denominators

QUICKSTART = Path(tailrace.__file__).parent / "recipes" / "models" / "quickstart"
KEPT_VERSIONS = 10
"""Folders of weights that stay: the run may still be reading an older one."""


def padded(samples: Sequence[StreamedSample], pad_id: int) -> dict[str, Tensor]:
    """What TRL's loss reads, [num_samples, longest]: prompts padded on the left, all that follows on the right."""
    starts = [int(sample.loss_mask.argmax()) for sample in samples]  # the first token that bears loss

    def prompts(values: Callable[[StreamedSample], Any], padding: float) -> Tensor:
        parts = [torch.tensor(values(one)[:start]) for one, start in zip(samples, starts, strict=True)]
        return pad_sequence(parts, batch_first=True, padding_value=padding, padding_side="left")

    def completions(values: Callable[[StreamedSample], Any], padding: float) -> Tensor:
        parts = [torch.tensor(values(one)[start:]) for one, start in zip(samples, starts, strict=True)]
        return pad_sequence(parts, batch_first=True, padding_value=padding)

    return {
        "prompt_ids": prompts(lambda one: one.token_ids, pad_id).long(),
        "prompt_mask": prompts(lambda one: one.token_ids >= 0, 0).long(),
        "completion_ids": completions(lambda one: one.token_ids, pad_id).long(),
        "completion_mask": completions(lambda one: one.token_ids >= 0, 0).long(),
        "tool_mask": completions(lambda one: one.loss_mask, 0).long(),  # what the policy did not sample bears no loss
        "advantages": completions(lambda one: one.advantages, 0),
        "old_per_token_logps": completions(lambda one: one.logprobs, 0),  # of the policy that sampled the token
    }


class RunIsOver(Exception):
    """The run asks for the end."""


def make_trainer(feed: Feed, arguments: argparse.Namespace) -> Any:
    """TRL's trainer, with another source of samples and somebody who is told of its steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig, GRPOTrainer

    class StreamedTrainer(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer, but for where its samples come from."""

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
            """As many samples as one step takes here: TRL hands in as many prompts, which are not used."""
            self.samples = feed.pull(len(inputs))
            if not self.samples:
                raise RunIsOver
            whole = denominators(self.samples, lambda counts: self.accelerator.reduce(torch.tensor(counts)).tolist())
            tensors = padded(self.samples, self.processing_class.pad_token_id)
            return {**tensors, "num_items_in_batch": torch.tensor(whole.loss_tokens)}

    class Publisher(TrainerCallback):  # type: ignore[misc]
        """After each step: weights in a folder of their own, and what the step was taken on."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            folder = arguments.weights / f"version_{state.global_step:06d}"
            trainer.model.save_pretrained(folder, save_original_format=False)
            feed.step_done(state.global_step, trainer.samples, weights=folder)
            outdated = arguments.weights / f"version_{state.global_step - KEPT_VERSIONS:06d}"
            shutil.rmtree(outdated, ignore_errors=True)

    disable_progress_bar()  # of every folder of weights
    config = GRPOConfig(
        output_dir=str(arguments.weights),
        max_steps=arguments.steps,
        learning_rate=8e-4,
        lr_scheduler_type="linear",
        adam_beta2=0.99,
        per_device_train_batch_size=arguments.batch_size // 4,
        gradient_accumulation_steps=4,
        num_generations=8,
        loss_type="dapo",
        epsilon_high=0.28,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = StreamedTrainer(
        model=str(arguments.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),  # TRL wants one; the run's environment scores
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * arguments.batch_size),
        callbacks=[Publisher()],
    )
    return trainer


def main() -> None:
    """Train until TRL has taken all its steps, or the run asks for the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run's folder, or the URL of its Redis")
    parser.add_argument("--name", default="", help="of the run, where a URL is given")
    parser.add_argument("--model", type=Path, default=QUICKSTART, help="the model that the run began with")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="a folder that the run sees too")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=64, help="samples that each step takes")
    arguments = parser.parse_args()
    with Feed(FeedPlace(arguments.run, arguments.name) if arguments.name else arguments.run) as feed:
        trainer = make_trainer(feed, arguments)
        try:
            trainer.train()
        except RunIsOver:
            print(f"the run asks for the end: {feed.stop}")
        trainer.save_model(arguments.weights / "final")


if __name__ == "__main__":
    main()
