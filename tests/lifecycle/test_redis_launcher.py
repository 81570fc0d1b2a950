"""How a role on another machine is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.redis_servers import needs_redis, place_of, redis_server

from tailrace.errors import LifecycleError
from tailrace.lifecycle.launchers import base
from tailrace.lifecycle.launchers.redis import Beat, RedisLauncher, RoleLeft
from tailrace.lifecycle.roles import RoleSpec
from tailrace.transport.channels import encode

pytestmark = needs_redis


async def test_a_machine_that_does_not_say_that_its_role_was_killed_is_what_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "KILLED_WITHIN_S", 0.1)
    heard = asyncio.Event()
    with redis_server(tmp_path) as server:
        async with asyncio.timeout(60), RedisLauncher("epoch", tmp_path / "logs") as launcher:
            launcher.redis = place = place_of(server, epoch="epoch")
            trainer = launcher.start(RoleSpec("trainer", "of:nobody", b""))
            machine = place.open_channel(
                place.address(trainer.instance),
                bind=False,
                on_message=lambda message: heard.set() if message == encode(Beat()) else None,
                changed=asyncio.Event(),
                peer="orchestrator",
            )
            machine.send(encode(Beat()))
            await heard.wait()
            with pytest.raises(LifecycleError, match=r"^the trainer was killed, and its machine does not say that"):
                await trainer.kill()
            machine.send(encode(RoleLeft(0, "")))
            await trainer.left()
            await machine.close()
