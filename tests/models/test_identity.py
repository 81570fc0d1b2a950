"""Two configurations are those of one architecture where the same weights compute the same."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from tailrace.models.identity import other_architecture


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LlamaConfig, {"initializer_range": 0.5, "attention_dropout": 0.1, "use_cache": False, "pretraining_tp": 2}),
        (LlamaConfig, {"dtype": "bfloat16", "bos_token_id": 5, "output_hidden_states": True, "num_labels": 3}),
        (GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}),
        (OPTConfig, {"dropout": 0.0, "layerdrop": 0.5, "init_std": 0.5}),
        (MixtralConfig, {"router_aux_loss_coef": 0.5, "router_jitter_noise": 0.5, "output_router_logits": True}),
    ],
)
def test_what_matters_in_pretraining_or_to_a_library_alone_is_no_architecture(
    kind: type[LlamaConfig], changes: dict[str, object]
) -> None:
    own, other = kind().to_dict(), kind(**changes).to_dict()
    assert own != other
    assert other_architecture(own, other) == other_architecture({"text_config": own}, {"text_config": other}) == []


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LlamaConfig, {"rms_norm_eps": 1e-3}),
        (LlamaConfig, {"tie_word_embeddings": True}),
        (LlamaConfig, {"num_hidden_layers": 5}),
        (MixtralConfig, {"num_experts_per_tok": 3}),
    ],
)
def test_what_changes_what_is_computed_is(kind: type[LlamaConfig], changes: dict[str, object]) -> None:
    [difference] = other_architecture(kind().to_dict(), kind(**changes).to_dict())
    assert difference.startswith(next(iter(changes)))
