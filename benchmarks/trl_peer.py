"""TRL's GRPOTrainer on the workload of `vs_trl.py`. Runs in TRL's own environment, as a process of its own.

    .venv-trl/bin/python benchmarks/trl_peer.py job.json

The job says what to train and where to leave the figures (see `run_peer` in `peers.py`). CPU and wall time run from the
beginning of the first step to the end of the last; tokens are those of the completions that were trained, which all
bear loss. Where training ends before a generation is used up, they are that share of what was generated.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.shared_tasks import REWARDS, read_rows


class Meter(TrainerCallback):
    """Counts from the first step on, and ends training at enough tokens."""

    def __init__(self, batch_size: int, max_tokens: int | None) -> None:
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.generated_tokens = self.completions = 0
        self.rewards: list[float] = []
        self.start: tuple[float, float] | None = None
        self.end = (0.0, 0.0)
        self.steps = 0

    def reward(self, prompts, completions, completion_ids, answer, **_):
        """What TRL calls for every generation batch."""
        self.generated_tokens += sum(len(ids) for ids in completion_ids)
        self.completions += len(completion_ids)
        values = [self.function(parts[0]["content"], one) for parts, one in zip(completions, answer, strict=True)]
        self.rewards.append(sum(values) / len(values))
        return values

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.start is None:
            self.start = now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.end, self.steps = now(), state.global_step
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            control.should_training_stop = True

    @property
    def tokens(self) -> int:
        """Of the optimizer steps so far, each over `batch_size` completions, drawn from those of its generation."""
        return round(self.generated_tokens * self.steps * self.batch_size / max(1, self.completions))


def now() -> tuple[float, float]:
    """CPU seconds of this process and its children, and wall seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system, time.perf_counter()


def grpo_config(job: dict[str, Any], **own: object) -> GRPOConfig:
    """What all comparisons set alike: the loss and optimizer of ours, no reference model, nothing written."""
    return GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        per_device_train_batch_size=job["tuning"]["micro_batch"],
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="none",
        bf16=job["precision"] == "bfloat16",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": job["tuning"]["attention"]},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **own,
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    tuning = job["tuning"]
    torch.set_num_threads(tuning["threads"])
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    meter = Meter(job["batch_size"], job["max_tokens"])
    meter.function = REWARDS[job["reward"]]
    rows = read_rows(Path(job["tasks"]))
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    )
    config = grpo_config(
        job,
        seed=job["seed"],
        max_steps=job["steps"],
        learning_rate=job["learning_rate"],
        gradient_accumulation_steps=job["batch_size"] // tuning["micro_batch"],
        steps_per_generation=tuning["steps_per_generation"],
        use_transformers_continuous_batching=tuning["continuous_batching"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens_per_completion"],
        num_iterations=1,
    )
    trainer = GRPOTrainer(
        model=job["model"], reward_funcs=meter.reward, args=config, train_dataset=dataset, callbacks=[meter]
    )
    trainer.train()
    if job["save"]:
        trainer.save_model(job["save"])
    assert meter.start is not None
    figures = {
        "tokens": meter.tokens,
        "generated_tokens": meter.generated_tokens,
        "cpu_s": meter.end[0] - meter.start[0],
        "wall_s": meter.end[1] - meter.start[1],
        "steps": meter.steps,
        "mean_tokens": meter.generated_tokens / max(1, meter.completions),
        "rewards": meter.rewards,
    }
    Path(job["figures"]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
