"""What a process keeps of conversations that are over."""

from __future__ import annotations

import asyncio
import gc
import weakref

from tailrace.transport.redis.channels import RedisFigures, RedisPlace
from tailrace.transport.redis.server import RedisServer
from tailrace.transport.redis.streams import Origin
from tests.support.redis_servers import needs_redis, place_of

PATIENCE_S = 20.0


class Ended:
    """It wrote and read."""

    times_restored, num_ignored = 2, 3


def test_what_one_that_ended_came_to_still_counts() -> None:
    place, user = RedisPlace("redis://nowhere", Origin("run", "epoch")), Ended()
    place.count(user)
    for _ in range(2):
        place.settle(user)
        assert place.figures == RedisFigures(outages=0, away_s=0.0, restored=2, ignored=3)


@needs_redis
async def test_one_that_is_closed_is_let_go(server: RedisServer) -> None:
    place = place_of(server)
    channel = place.open_channel(
        place.address("batches"), bind=True, on_message=print, changed=asyncio.Event(), peer="trainer"
    )
    await channel.close()
    is_left = weakref.ref(channel)
    del channel
    async with asyncio.timeout(PATIENCE_S):
        while is_left() is not None:  # a thread that closed it may hold it for a moment
            await asyncio.sleep(0.01)
            gc.collect()
