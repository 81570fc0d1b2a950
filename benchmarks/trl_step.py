"""Steps of TRL's GRPOTrainer on given tokens. Runs in TRL's own environment, as a process of its own.

    .venv-trl/bin/python benchmarks/trl_step.py job.json

Generation is replaced by the job's tokens (`rollout_func`), and what TRL does to score and pad them is left out of the
figures: they are of the passes, the clip and the optimizer alone.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.trl_peer import grpo_config


class GivenTokens:
    """What stands in for generation: batch after batch, as the sampler asks for their prompts."""

    def __init__(self, batches: list[list[dict[str, list]]]) -> None:
        self.batches = iter(batches)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        rollouts = [
            (group["prompt"], completion) for group in next(self.batches) for completion in group["completions"]
        ]
        assert len(rollouts) == len(prompts)
        return {
            "prompt_ids": [prompt for prompt, _ in rollouts],
            "completion_ids": [completion for _, completion in rollouts],
            "logprobs": None,
        }


class MeteredTrainer(GRPOTrainer):
    """Leaves out the CPU time of preparing batches."""

    preparing_s = 0.0

    def _prepare_inputs(self, generation_batch):
        began_s = time.process_time()
        inputs = super()._prepare_inputs(generation_batch)
        self.preparing_s += time.process_time() - began_s
        return inputs


class Meter(TrainerCallback):
    """CPU seconds of every optimizer step."""

    def __init__(self) -> None:
        self.trainer: MeteredTrainer | None = None
        self.cpu_s: list[float] = []
        self.began_s = 0.0

    def now_s(self) -> float:
        assert self.trainer is not None
        return time.process_time() - self.trainer.preparing_s

    def on_step_begin(self, args, state, control, **_) -> None:
        self.began_s = self.now_s()

    def on_step_end(self, args, state, control, **_) -> None:
        self.cpu_s.append(self.now_s() - self.began_s)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    tuning = job["tuning"]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    groups = job["batches"][0]
    group_size = len(groups[0]["completions"])
    rollouts = len(groups) * group_size
    meter = Meter()
    config = grpo_config(
        job,
        max_steps=len(job["batches"]),
        learning_rate=1e-6,
        gradient_accumulation_steps=rollouts // tuning["micro_batch"],
        num_generations=group_size,
        max_completion_length=max(
            len(one) for batch in job["batches"] for group in batch for one in group["completions"]
        ),
    )
    trainer = MeteredTrainer(
        model=job["model"],
        reward_funcs=lambda completions, **_: [float(index % 2) for index in range(len(completions))],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * rollouts),
        rollout_func=GivenTokens(job["batches"]),
        callbacks=[meter],
    )
    meter.trainer = trainer
    trainer.train()
    Path(job["figures"]).write_text(json.dumps({"cpu_s": meter.cpu_s[1:]}))


if __name__ == "__main__":
    main()
