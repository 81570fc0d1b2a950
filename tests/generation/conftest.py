from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from tests.generation.engine_kinds import EngineKind, start_vllm, torch_kind, vllm_kind
from tests.generation.engine_support import make_model

IN_ONE_PROCESS = pytest.mark.xdist_group("vllm")
"""Importing vLLM takes seconds: all that needs it runs in one of the test command's processes."""


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """A tiny Qwen3 with tied embeddings; read only."""
    return make_model()


@pytest.fixture(
    scope="session",
    params=[
        "torch",
        pytest.param("vllm", marks=IN_ONE_PROCESS),
        pytest.param("vllm, one step in flight", marks=IN_ONE_PROCESS),
    ],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineKind]:
    """Every kind of engine in turn."""
    if request.param == "torch":
        yield torch_kind()
        return
    core = start_vllm(tmp_path_factory.mktemp("model"), asynchronous=request.param != "vllm")
    yield vllm_kind(core)
    core.shutdown()
