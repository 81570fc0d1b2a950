from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.rollouts import ChatRenderer
from tests.support.chat_models import CHATML, HERMES, SMOLLM2, STRICT, save_chat_model

TEMPLATES = {"chatml": CHATML, "smollm2": SMOLLM2, "hermes": HERMES, "strict": STRICT}
QWEN3 = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatRenderer]:
    """A renderer by its template's name, or of the Qwen3 family."""
    made: dict[str, ChatRenderer] = {}

    def make(name: str) -> ChatRenderer:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            model_name = QWEN3 if name == "qwen3" else None
            made[name] = ChatRenderer(save_chat_model(folder, template=TEMPLATES.get(name, HERMES), name=model_name))
        return made[name]

    return make


@pytest.fixture
def renderer(renderer_of: Callable[[str], ChatRenderer]) -> ChatRenderer:
    return renderer_of("chatml")
