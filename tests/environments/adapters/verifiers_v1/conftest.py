from __future__ import annotations

import asyncio

import pytest

from tailrace.environments.adapters.verifiers_v1.wire import Episode


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bytes]:
    """Those that a server sends, once an episode has heard them."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    hear = Episode.hear

    def hear_and_keep(episode: Episode, data: bytes) -> None:
        hear(episode, data)
        heard.put_nowait(data)

    monkeypatch.setattr(Episode, "hear", hear_and_keep)
    return heard
