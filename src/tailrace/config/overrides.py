"""`--dotted.key value` on the command line, laid over a file's table."""

from __future__ import annotations

import copy
import datetime
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w
from pydantic import BaseModel

from tailrace.config.sections import end_of, kinds_in
from tailrace.config.sources import Key, Table, as_index, require_shallow
from tailrace.errors import SettingsError
from tailrace.training.settings.losses import DEFAULT_LOSS, CommonLossSettings, LossSettings

LOSS_NAME = ("trainer", "loss", "name")
_FIRST = frozenset({("environment",), ("environment", "name"), LOSS_NAME})
"""What decides which settings of the file's are left is laid over it before the others."""
_LOSSES = kinds_in(LossSettings)
_OF_ONE_ENVIRONMENT = frozenset(
    {"args", "columns", "data", "eval_data", "eval_tasks", "id", "judge", "rewards", "trusted"}
)
_OWN_NAMES = {"rewards": 1, "args": 2, "vllm": 2}
"""How far behind one of these the names are users' own; arguments themselves are Python's, which have no dash."""
_UNSET = object()


def parse_overrides(arguments: Sequence[str], model: type[BaseModel]) -> dict[tuple[str, ...], Any]:
    """Read `--a.b value`, `--a.b=value`, `--flag` (true), `--a.b unset` (no value). Raises `SettingsError`.

    Values are TOML where they can be, else text; numbers and dates are text where `model` has a setting that is text.
    `--environment NAME` is short for `--environment.name NAME`.

    >>> from tailrace.config import RunSettings
    >>> parse_overrides(["--max_steps", "3", "--resume", "--model.name=Qwen/Qwen3-0.6B", "--name", "1e3"], RunSettings)
    {('max_steps',): 3, ('resume',): True, ('model', 'name'): 'Qwen/Qwen3-0.6B', ('name',): '1e3'}
    >>> parse_overrides(["--environment", "arithmetic"], RunSettings)
    {('environment', 'name'): 'arithmetic'}
    >>> parse_overrides(["--environment.group-size=4", "--environment.rewards.exact-match.weight", "0.5"], RunSettings)
    {('environment', 'group_size'): 4, ('environment', 'rewards', 'exact-match', 'weight'): 0.5}
    """
    overrides: dict[tuple[str, ...], Any] = {}
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or len(argument) == 2:
            raise SettingsError(f"unexpected argument {argument!r}; settings are given as --section.key value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        parsed = _parse_value(value)
        require_shallow(parsed, f"command line: {name}")
        key = _named(_key(name), parsed)
        overrides[key] = value if _is_amount(parsed) and _is_text(model, key) else parsed
    return overrides


def _is_amount(value: Any) -> bool:
    kinds = int | float | datetime.date | datetime.time
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_text(model: type[BaseModel], key: tuple[str, ...]) -> bool:
    """Whether a setting takes any text, as a name does."""
    path: Key = ("environments", 0, *key[1:]) if key[0] == "environment" else (*map(as_index, key),)
    field = end_of(model, path).field
    return field is not None and field.annotation in (str, str | None)


def _key(name: str) -> tuple[str, ...]:
    """Of a dotted name; a dash is an underscore but in names of users' own."""
    typed, parts = name.split("."), name.replace("-", "_").split(".")
    own = next((place + _OWN_NAMES[part] for place, part in enumerate(parts) if part in _OWN_NAMES), len(parts))
    return (*parts[:own], *typed[own:])


def as_toml(value: Any) -> str:
    """A value as the command line takes it after a setting's name: TOML on one line.

    >>> as_toml([{"name": "own:agent", "args": {"digits": [1, 2.5], "bare": True}}])
    '[{"name" = "own:agent", "args" = {"digits" = [1, 2.5], "bare" = true}}]'
    """
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        entries = (f"{json.dumps(name, ensure_ascii=False)} = {as_toml(one)}" for name, one in value.items())
        return f"{{{', '.join(entries)}}}"
    return tomli_w.dumps({"value": value}).partition("=")[2].strip()


def flattened(changes: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The same form of what a program gives: dotted names, or tables in tables.

    Names of users' own may have dots; what is below them is a value, as on the command line.

    >>> flattened({"max_steps": 3, "trainer.threads": 2, "model": {"name": "m"}})
    {('max_steps',): 3, ('trainer', 'threads'): 2, ('model', 'name'): 'm'}
    >>> flattened({"environment": {"args": {"weights": {"v1.5": 0.3}, "extra": {}}}})
    {('environment', 'args', 'weights'): {'v1.5': 0.3}, ('environment', 'args', 'extra'): {}}
    """
    found: dict[tuple[str, ...], Any] = {}
    are_own = not _OWN_NAMES.keys().isdisjoint(prefix)
    for name, value in changes.items():
        key = (*prefix, name) if are_own else (*prefix, *name.split("."))
        found |= flattened(value, key) if _is_section(key, value) else {_named(key, value): value}
    return found


def _is_section(key: tuple[str, ...], value: Any) -> bool:
    """Whether it is laid over a section by its entries. A table in users' arguments is not, nor a reward without any:
    that is a function as it is."""
    own = _OWN_NAMES.keys() & key[:-1]
    return isinstance(value, Mapping) and (not own or (own == {"rewards"} and bool(value)))


def _named(key: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """A key, that of the name where `environment` is no table."""
    return ("environment", "name") if key == ("environment",) and not isinstance(value, Mapping) else key


def apply_overrides(table: Table, overrides: dict[tuple[str, ...], Any]) -> Table:
    """A copy of `table` with the overrides.

    Naming another environment drops what the file says of the old one alone, and keeps its size, limits and sampling;
    naming another loss drops what that one does not know, or means otherwise.
    """
    merged = copy.deepcopy(table)
    ordered = sorted(overrides.items(), key=lambda item: item[0] not in _FIRST)
    for key, value in ordered:
        if key[0] == "environment":
            _override_environment(merged, key[1:], value)
        else:
            if key == LOSS_NAME:
                _forget_loss(merged, value)
            _set(merged, key, value, key)
    return merged


def _forget_loss(table: Table, name: Any) -> None:
    trainer = table.get("trainer")
    if isinstance(trainer, dict) and isinstance(loss := trainer.get("loss"), dict):
        trainer["loss"] = kept_by_loss(loss, DEFAULT_LOSS if name is _UNSET else name)


def kept_by_loss(loss: Table, name: object) -> Table:
    """Those of a loss's settings that mean the same with the loss `name` in its place.

    >>> kept_by_loss({"name": "dapo", "clip_low": 0.2, "entropy": 0.01}, "cispo")
    {'name': 'dapo', 'entropy': 0.01}
    """
    former = loss.get("name", DEFAULT_LOSS)
    if former == name:
        return loss
    return {key: value for key, value in loss.items() if _stays(key, _loss(former), _loss(name))}


def _loss(name: object) -> type[BaseModel]:
    """Of one's own losses, whose arguments are their own, and of unknown ones, what all have in common."""
    return _LOSSES.get(str(name), CommonLossSettings)


def _stays(key: str, former: type[BaseModel], chosen: type[BaseModel]) -> bool:
    """Whether both losses mean the same by it, as their settings tell."""
    known, before = chosen.model_fields.get(key), former.model_fields.get(key)
    return known is not None and (before is None or before.description == known.description)


def _override_environment(table: Table, key: tuple[str, ...], value: Any) -> None:
    environments = table.setdefault("environments", [{}])
    given, path = ("environment", *key), ("environments", "0", *key)
    if not isinstance(environments, list) or not all(isinstance(one, dict) for one in environments):
        raise SettingsError(
            f"--{'.'.join(given)} edits the only environment, but environments = {environments!r:.80}: it is a list; "
            "each entry is a table [[environments]]"
        )
    if len(environments) != 1:
        raise SettingsError(
            f"--{'.'.join(given)} edits the only environment, but there are {len(environments)}: "
            f"write --{'.'.join(path)}"
        )
    if key == ("name",):
        environments[0] = kept_by_environment(environments[0], value)
    _set(table, path, value, given)


def kept_by_environment(environment: Table, name: object) -> Table:
    """Those of an environment's settings that hold with `name` in its place: not its arguments and data, what scores
    it, what is saved of it, and whether it is trusted.

    >>> kept_by_environment({"name": "arithmetic", "args": {"digits": 3}, "group_size": 8}, "reverse-text")
    {'name': 'arithmetic', 'group_size': 8}
    >>> ours = {"judge": {"rubric": "brief"}, "rewards": {"right": {}}, "columns": ["note"], "trusted": True}
    >>> kept_by_environment({"name": "own:agent", "max_turns": 2, **ours}, "arithmetic")
    {'name': 'own:agent', 'max_turns': 2}
    """
    if environment.get("name") in (None, name):  # without one it is this one's
        return environment
    return {key: value for key, value in environment.items() if key not in _OF_ONE_ENVIRONMENT}


def _set(table: Any, path: tuple[str, ...], value: Any, full: Key) -> None:
    """Lay `value` at `path`, which has at least one part; errors call it `full`."""
    for depth, part in enumerate(path):
        if isinstance(table, list):
            index = as_index(part)
            if not isinstance(index, int) or index >= len(table):
                left_out = full[0] == "environments" and depth == 1 == len(table) and part.isidentifier()
                raise SettingsError(
                    f"--{'.'.join(map(str, full))}: {part!r} is no index into the {len(table)} entries there"
                    + (f"; write environment.{part} for that of the only one" if left_out else "")
                )
        elif isinstance(table, dict):
            index = part
        else:
            holder = ".".join(map(str, full[: depth - len(path)]))
            raise SettingsError(f"--{'.'.join(map(str, full))}: {holder} is a value, not a section")
        if depth == len(path) - 1 and value is _UNSET:
            _unset(table, index, full)
        elif depth == len(path) - 1:
            table[index] = value
        else:
            table = table.setdefault(index, {}) if isinstance(table, dict) else table[index]


def _unset(table: Any, index: str | int, full: Key) -> None:
    """Without an entry the others of a list would have other numbers, here and in a resume."""
    if isinstance(table, list):
        name, holder = ".".join(map(str, full)), ".".join(map(str, full[:-1]))
        raise SettingsError(
            f"--{name} unset: an entry of a list cannot be unset; give the list without it, --{holder} '[...]'"
        )
    table.pop(index, None)


def _parse_value(text: str) -> Any:
    if text == "unset":
        return _UNSET
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError as error:
        raise SettingsError(f"command line: {text[:16]}... nests too deep to be read") from error
