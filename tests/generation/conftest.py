from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.generation.engine_support import make_model


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """A tiny Qwen3 with tied embeddings; read only."""
    return make_model()
