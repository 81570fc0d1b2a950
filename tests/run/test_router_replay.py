"""Rollouts of several turns: each turn's experts join those of the turns before, and all of them are replayed."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tailrace.config import load_settings
from tests.run.runs import ROOT, environment, records, run_inline

QUICKSTART = ROOT / "src" / "tailrace" / "recipes" / "models" / "quickstart"
TURNS = ("--rollouts.max_turns", "3", "--scheduling.max_staleness", "0", "--schedule", "sync", "--max_steps", "2")


def save_mixtral(folder: Path) -> Path:
    """A tiny random one that speaks the bundled model's tokens, with experts far enough apart that a mistake shows."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / name, folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=1024, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=512, initializer_range=0.2,
        **shape,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


async def test_every_turns_experts_are_replayed_where_they_were_chosen(tmp_path: Path) -> None:
    model = save_mixtral(tmp_path / "mixtral")
    returning = ("--model.name", str(model), "--generator.return_routed_experts", "true")
    summary = await run_inline(tmp_path, *environment("conversing"), *TURNS, *returning)
    assert summary.exit_code == 0
    lines = records(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["rollout/turns"] == 3
        assert line["training/router_agreement"] > 0.999
        assert line["training/logprob_difference_fresh"] < 1e-4
        unknown = line["batch/samples"] / line["batch/tokens"]  # each sample's last token; shared beginnings count once
        assert 1 - 2 * unknown < line["training/replayed_share"] < 1


def test_replay_is_automatic_and_the_experts_are_asked_for() -> None:
    settings = load_settings("quickstart")
    assert (settings.trainer.router_replay, settings.generator.return_routed_experts) == ("auto", False)
