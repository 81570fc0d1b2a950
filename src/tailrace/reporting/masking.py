"""Settings as a run shows them, to trackers, in its report, on the dashboard and in its log: without keys of servers.

What an environment's `args.headers` and a command's `args.env` hold may be keys, and so may users and passwords in
addresses of a server, a judge, a teacher and Redis. The run's own config.toml keeps them as they are, since a resume
needs them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import tomli_w

from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import Json
from tailrace.urls import without_user

MASK = "***"
_ADDRESSES = (("trainer", "loss", "distillation", "url"), ("transport", "redis", "url"))
_NAMES_A_VARIABLE = re.compile(r"(\w+ )?\$(\w+|\{\w+\})")


def masked(settings: dict[str, Json]) -> dict[str, Json]:
    """The settings, with a mask for every text in those tables but for what only names a variable; addresses have no
    user.

    >>> args = {"headers": {"Authorization": "Bearer 4711", "X-Key": "Bearer $MCP_KEY"}}
    >>> masked({"environments": [{"name": "mcp", "args": args}]})["environments"][0]["args"]
    {'headers': {'Authorization': '***', 'X-Key': 'Bearer $MCP_KEY'}}
    """
    shown = settings
    for names in _ADDRESSES:
        shown = _without_user_at(shown, *names)
    environments = shown.get("environments")
    if not isinstance(environments, list):
        return shown
    return {**shown, "environments": [_environment(one) for one in environments]}


def masked_text(text: str) -> str:
    """The same of a settings file; empty where it is none."""
    try:
        with guarded("these are no settings", DataError):
            settings = tomllib.loads(text)
            shown = masked(settings)
            return text if shown == settings else tomli_w.dumps(shown)
    except DataError:
        return ""


def flat(settings: object) -> dict[str, object]:
    """Every value by its dotted name; a list of plain values is one, and so is an empty table.

    >>> flat({"environments": [{"name": "mcp", "args": {}}], "betas": [0.9, 0.95]})
    {'environments.0.name': 'mcp', 'environments.0.args': {}, 'betas': [0.9, 0.95]}
    """
    return dict(_leaves(settings, ""))


def names_of_keys(settings: dict[str, Json]) -> list[str]:
    """Settings that may hold a key, and are shown with a mask."""
    shown = flat(masked(settings))
    return [name for name, value in flat(settings).items() if shown.get(name) != value]


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        entries = list(value.items())
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        entries = list(enumerate(value))
    else:
        yield name, value
        return
    for key, entry in entries:
        yield from _leaves(entry, f"{name}.{key}" if name else str(key))


def _without_user_at(table: dict[str, Json], name: str, *names: str) -> dict[str, Json]:
    """The table, the address in it that is called so without its user."""
    value = table.get(name)
    if isinstance(value, dict) and names:
        return {**table, name: _without_user_at(value, *names)}
    return {**table, name: without_user(value)} if isinstance(value, str) and not names else table


def _environment(environment: Json) -> Json:
    if not isinstance(environment, dict):
        return environment
    shown = _without_user_at(_without_user_at(environment, "judge", "url"), "args", "url")
    args = shown.get("args")
    if not isinstance(args, dict):
        return shown
    tables = ("headers", "env") if "command" in args else ("headers",)  # else `env` may be anything of an author's
    return {**shown, "args": {name: _table(value) if name in tables else value for name, value in args.items()}}


def _table(values: Json) -> Json:
    """Of names and values. An argument that happens to be called so, and is none, is left as it is."""
    if not isinstance(values, dict):
        return values
    return {name: MASK if _may_be_a_key(value) else value for name, value in values.items()}


def _may_be_a_key(value: Json) -> bool:
    return isinstance(value, str) and not _NAMES_A_VARIABLE.fullmatch(value)
