"""What a state dict of a model must hold, also where a trainer that is not ours wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tailrace.errors import ModelError
from tailrace.models.loading import model_without_memory
from tailrace.models.state_dicts import StateDictLayout
from tailrace.transport.weights.stores import MemoryModelStateDictStore
from tests.support.expert_models import expert_model


@pytest.fixture
def mixture() -> PreTrainedModel:
    return expert_model("qwen3-moe")


def test_a_mixture_of_experts_that_is_saved_by_its_own_names_can_be_installed(
    mixture: PreTrainedModel, tmp_path: Path
) -> None:
    mixture.save_pretrained(tmp_path, save_original_format=False)
    store = MemoryModelStateDictStore()
    with store.open(store.publish_folder(tmp_path, 1)) as found:
        checked = StateDictLayout(model_without_memory(mixture.config)).checked(found)
        assert {name.rpartition("experts.")[2] for name in checked if ".experts." in name} == {
            "gate_up_proj",
            "down_proj",
        }
        for name, tensor in checked.items():
            torch.testing.assert_close(tensor, mixture.state_dict()[name], rtol=0, atol=0)
    store.close()


def test_one_that_is_saved_expert_by_expert_is_refused_with_what_to_do(
    mixture: PreTrainedModel, tmp_path: Path
) -> None:
    mixture.save_pretrained(tmp_path)
    store = MemoryModelStateDictStore()
    with (
        store.open(store.publish_folder(tmp_path, 1)) as found,
        pytest.raises(ModelError, match=r"experts\.0\.down_proj.* by its own names \(.*save_original_format=False\)"),
    ):
        StateDictLayout(model_without_memory(mixture.config)).checked(found)
    store.close()


def test_a_stranger_among_weights_is_named(mixture: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match=r"weights that the model lacks: stranger$"):
        StateDictLayout(mixture).checked({**mixture.state_dict(), "stranger": torch.zeros(1)})
