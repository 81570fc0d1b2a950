"""What a run with clients outside has beside others: where they find it, and what people see of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import SettingsError
from tailrace.reporting.gauges import Gauge
from tailrace.rollouts import LoadedEnvironment
from tailrace.run.folder import told_in, writing

if TYPE_CHECKING:
    from tailrace.gateway import Gateway


def require_inside(environments: Mapping[str, LoadedEnvironment], command: str) -> None:
    """Raise `SettingsError` where a command without a run's folder was to wait for clients that could not find it."""
    for name, loaded in environments.items():
        if loaded.is_outside:
            raise SettingsError(
                f"environment {name!r} is played by clients outside, which find a run by its folder: `{command}` has "
                "none. Train it, with evaluation.every_steps for its held-out tasks"
            )


@contextlib.asynccontextmanager
async def offered(
    environments: Mapping[str, LoadedEnvironment], gateway: Gateway, path: Path
) -> AsyncIterator[list[Gauge]]:
    """Where clients outside play some of these: a file that tells them of the gateway, and gauges of what they do."""
    outside = [name for name, loaded in environments.items() if loaded.is_outside]
    if not outside:
        yield []
        return
    await gateway.listen()
    gateway.offers.environments = outside
    with contextlib.ExitStack() as told:
        with writing(path.parent):
            access = {"url": gateway.root_url, "key": gateway.offers.key}
            told.enter_context(told_in(path, json.dumps(access).encode()))
        yield [_outside_gauge(gateway)]


def _outside_gauge(gateway: Gateway) -> Gauge:
    """How many rollouts clients have, how many nobody has claimed, and how many clients wait for one."""
    offers = gateway.offers
    return lambda: {
        "gateway/unclaimed": sum(offers.waiting.values()),
        "gateway/claimed": offers.held,
        "gateway/asking": offers.asking,
    }


def waits_for_clients(gateway: Gateway | None) -> str:
    """Whom the run waits for while rollouts are offered and nobody has claimed any; empty otherwise."""
    if gateway is None or gateway.offers.held or not (waiting := gateway.offers.waiting):
        return ""
    count = sum(waiting.values())
    return (
        f"a client outside to claim one of {count} rollouts of {', '.join(sorted(waiting))} "
        f"(POST {gateway.root_url}/rollouts; gateway.json in the run's folder has the key)"
    )
