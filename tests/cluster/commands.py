"""Whether a rendered command is one that `tailrace` has, by its own parsers; nothing of it runs."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.cluster.command_lines import GIVEN_ADDRESS
from tailrace.commands import Join, Key, Serve, Train, parse
from tailrace.config import load_settings
from tailrace.config.serving import load_serve_settings
from tailrace.transport.keys import require_safe_address

VARIABLES = {
    "$connect": ",".join(map(GIVEN_ADDRESS.format, range(5757, 5759))),
    "$where": GIVEN_ADDRESS.format(5757),
    "$key": "run.key",
}


def require_known(command: Sequence[str]) -> None:
    """Raise what `tailrace` would for a command, its variables given values."""
    words = list(command[1:])
    for name, value in VARIABLES.items():
        words = [word.replace(name, value) for word in words]
    parsed, overrides = parse([word for word in words if word != "${resume[@]}"])
    match parsed:
        case Train():
            assert parsed.name is not None
            load_settings(parsed.recipe, [*overrides, f"--name={parsed.name}"])
        case Serve():
            load_serve_settings(parsed.model, overrides)
            require_safe_address(parsed.address, has_keys=parsed.key is not None, setting="", key_setting="")
        case Join() | Key():
            assert overrides == []
        case _:
            raise AssertionError(f"{words[0]} starts no role")
