"""What a run with clients outside has beside others: where they find it, and what people see of them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import SettingsError
from tailrace.extras import require_extra
from tailrace.records import SamplingParams
from tailrace.reporting.gauges import Gauge
from tailrace.rollouts import LoadedEnvironment, RolloutPolicy
from tailrace.run.folder import announcement_file, writing

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


def require_gateway(wanted: bool, what: str, key: tuple[str | int, ...] = ()) -> None:
    """Raise `SettingsError` where `what` asks for HTTP from the start, and what that needs is not installed."""
    for package in ("starlette", "uvicorn", "httptools") if wanted else ():
        require_extra(package, extra="gateway", what=what, key=key)


@contextlib.asynccontextmanager
async def offered(
    environments: Mapping[str, LoadedEnvironment],
    gateway: Gateway,
    path: Path,
    new_policy: Callable[[SamplingParams], RolloutPolicy],
) -> AsyncIterator[list[Gauge]]:
    """Where the gateway has an address from the start, or clients outside play some of these: a file that tells of it,
    and gauges of what such clients do. With a key of its own anybody may talk to the policy (`new_policy`)."""
    outside = [name for name, loaded in environments.items() if loaded.is_outside]
    if not outside and not gateway.settings.port:
        yield []
        return
    policy_key = secrets.token_urlsafe(24)
    await gateway.serve(policy_key, new_policy)
    gateway.offers.environments = outside
    with contextlib.ExitStack() as files:
        with writing(path.parent):
            access = {"url": gateway.public_url, "key": gateway.offers.key, "policy_key": policy_key}
            files.enter_context(announcement_file(path, json.dumps(access).encode()))
        yield [_outside_gauge(gateway)] if outside else []


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
        f"(POST {gateway.public_url}/rollouts; gateway.json in the run's folder has the key)"
    )
