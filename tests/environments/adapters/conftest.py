from __future__ import annotations

import pytest

from tailrace.rollouts import ChatRenderer
from tests.support.chat_models import HERMES, save_chat_model


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """Of a model that calls tools."""
    return ChatRenderer(save_chat_model(tmp_path_factory.mktemp("hermes"), template=HERMES))
