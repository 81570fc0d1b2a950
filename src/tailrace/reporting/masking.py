"""Settings as a run shows them, to trackers, in its report, on the dashboard and in its log: without keys of servers.

What an environment's `args.headers` and a command's `args.env` hold may be keys, and so may users and passwords in
addresses of a judge, a teacher and Redis. The run's own config.toml keeps them as they are: a resume needs them.
"""

from __future__ import annotations

import re
import tomllib

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


def _without_user_at(table: dict[str, Json], name: str, *names: str) -> dict[str, Json]:
    """The table, the address in it that is called so without its user."""
    value = table.get(name)
    if isinstance(value, dict) and names:
        return {**table, name: _without_user_at(value, *names)}
    return {**table, name: without_user(value)} if isinstance(value, str) and not names else table


def _environment(environment: Json) -> Json:
    if not isinstance(environment, dict):
        return environment
    shown = _without_user_at(environment, "judge", "url")
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
