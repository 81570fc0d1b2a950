from __future__ import annotations

from tests.rollouts.conftest import renderer, renderer_of

__all__ = ["renderer", "renderer_of"]
