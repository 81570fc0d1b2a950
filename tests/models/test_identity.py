"""Two configurations are those of one architecture where the same weights compute the same."""

from __future__ import annotations

import json

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, OPTConfig, Qwen2Config

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


AS_PUBLISHED = {
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "sliding_window": 4096,
    "use_sliding_window": False, "max_window_layers": 21, "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_configuration_as_it_was_published_is_the_one_that_transformers_makes_of_it() -> None:
    read = json.loads(Qwen2Config.from_dict(dict(AS_PUBLISHED)).to_json_string(use_diff=False))
    assert read["sliding_window"] is None
    assert other_architecture(AS_PUBLISHED, read) == other_architecture(read, AS_PUBLISHED) == []
    wider = AS_PUBLISHED | {"hidden_size": 64}
    assert other_architecture(wider, read) == ["hidden_size is 32 there and 64 here"]
    windowed = AS_PUBLISHED | {"use_sliding_window": True}
    assert other_architecture(windowed, read)[0] == "sliding_window is null there and 4096 here"


def test_of_a_type_that_transformers_does_not_know_the_words_count() -> None:
    own = AS_PUBLISHED | {"model_type": "unheard of"}
    assert other_architecture(own, own | {"sliding_window": None}) == ["sliding_window is null there and 4096 here"]
