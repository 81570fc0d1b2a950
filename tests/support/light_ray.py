"""The light roles, on the nodes of a Ray cluster, beside agent workers as they are."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.ray import RayLauncher
from tailrace.lifecycle.roles import RoleSpec
from tailrace.run.roles import AGENT_WORKER
from tests.support import light_roles

HOLDS = "TAILRACE_TEST_HOLDS"
"""A folder: while a role's name is in it, the cluster is not asked for a place for that role."""
_LOOK_S = 0.02


class LightRayLauncher(RayLauncher):
    """Starts these roles in place of the run's own."""

    @override
    async def place(self, name: str) -> None:
        holds = os.environ.get(HOLDS)
        while holds and Path(holds, name).exists():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(_LOOK_S)
        await super().place(name)

    @override
    def start(self, spec: RoleSpec, *, is_replaceable: bool = False, life: int = 0) -> RoleHandle:
        if spec.entry != AGENT_WORKER:
            kind = "trainer" if spec.name.startswith("trainer") else "generator"
            spec = replace(spec, entry=f"{light_roles.__name__}:{kind}")
        return super().start(spec, is_replaceable=is_replaceable, life=life)
