"""What the roles run: commands that `tailrace` has, as lists of arguments. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tailrace.config import load_settings
from tailrace.config.overrides import as_toml, parse_overrides
from tailrace.config.serving import OF_RUNS
from tailrace.config.settings import RunSettings
from tailrace.errors import SettingsError

PORT = 5757
"""Of the first generator; each one on the same node has the next."""
_OF_A_START = ("--resume", "--allow_changed_settings", "--allow-changed-settings")
GIVEN_ADDRESS = "tcp://192.0.2.1:{}"
"""Stands for a generator whose address is known when the run starts (a block that is nobody's: RFC 5737)."""


def train(settings: RunSettings, recipe: str, overrides: Sequence[str], connecting: Sequence[str] = ()) -> list[str]:
    """The command of a run; `connecting` is what `connect_to` says, where it does not start its generators itself."""
    given = _joined(overrides)
    replaced = ["--name", *(f"--generator.replicas{of}" for of in ("", ".min", ".max") if connecting)]
    kept = [one for one in given if one.partition("=")[0] not in replaced]
    return ["tailrace", "train", recipe, "--name", settings.name, *kept, *connecting]


def connect_to(addresses: str, key: str, settings: RunSettings) -> list[str]:
    """What tells a run of its generators, each of which may take as long to come as one that the run starts."""
    return [
        "--generator.replicas=1",
        f"--generator.connect={addresses}",
        f"--generator.connect_key={key}",
        f"--generator.connect_wait_s={settings.generator.router.start_deadline_s:g}",
    ]


def serve(settings: RunSettings, address: str, key: str) -> list[str]:
    """The command of one generator."""
    chosen = ["tailrace", "serve", settings.model.name, "--address", address, "--key", key]
    for section in ("model", "generator"):
        given = getattr(settings, section).model_dump(mode="json", exclude_defaults=True)
        for path, value in _leaves(given):
            if path != ("name",) and path[0] not in OF_RUNS:
                chosen.append(f"--{'.'.join((section, *path))}={_text(value)}")
    return chosen


def join(settings: RunSettings, runs: str) -> list[str]:
    """The command of a trainer on a node of its own."""
    redis = settings.transport.redis
    assert redis.url is not None, "settings refuse placement = redis without it"
    return ["tailrace", "join", settings.name, "--redis", redis.url, "--runs", runs, "--prefix", redis.prefix]


def require_renderable(settings: RunSettings, overrides: Sequence[str]) -> None:
    """Raise `SettingsError` for `resume`, which each start decides anew, and for a password in Redis' address."""
    if any(one.partition("=")[0] in _OF_A_START for one in overrides):
        raise SettingsError("what is rendered goes on by itself where its run has begun: leave --resume out")
    url = urlsplit(settings.transport.redis.url or "")
    if url.password or "password" in parse_qs(url.query):
        raise SettingsError(
            "transport.redis.url holds a password, which would stand in what is rendered: leave it out, and give it in "
            "the environment variable TAILRACE_REDIS_PASSWORD",
            key=("transport", "redis", "url"),
        )


def require_connectable(settings: RunSettings, recipe: str, overrides: Sequence[str]) -> None:
    """Raise `SettingsError` where the settings do not go with generators on other nodes."""
    addresses = ",".join(GIVEN_ADDRESS.format(PORT + index) for index in range(settings.generator.replicas.min))
    load_settings(recipe, [*overrides, *connect_to(addresses, "generators.key", settings)])


def _joined(overrides: Sequence[str]) -> list[str]:
    """`--name value` as `--name=value`, so that no value is taken for a name.

    >>> _joined(["--trainer.ranks", "4", "--resume"])
    ['--trainer.ranks=4', '--resume']
    """
    joined: list[str] = []
    for argument in overrides:
        if joined and not argument.startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _leaves(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*prefix, name))
        elif value is not None:
            yield (*prefix, name), value


def _text(value: Any) -> str:
    """A value as the command line has it: plain where it is read back as it was, else in TOML.

    >>> _text("a b"), _text("4"), _text(1e-06), _text([1, 2])
    ('a b', '"4"', '1e-06', '[1, 2]')
    """
    for text in (*([value] if isinstance(value, str) else []), as_toml(value)):
        if _is_read_back(text, value):
            return text
    raise SettingsError(f"a setting is {value!r}, which the command line cannot say")


def _is_read_back(text: str, value: Any) -> bool:
    return bool(parse_overrides([f"--value={text}"], RunSettings).get(("value",)) == value)
