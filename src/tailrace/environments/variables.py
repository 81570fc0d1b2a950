"""Values in settings that name environment variables, so that keys stay out of settings and of all that shows them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template

from tailrace.errors import SettingsError


def with_variables(values: Mapping[str, str], *, argument: str) -> dict[str, str]:
    """The values with variables in the place of their names: `$NAME` or `${NAME}`; `$$` is a `$`.

    They are the `argument` of an environment. Raises `SettingsError` for a variable that is not set, and for a `$` that
    names none.
    """
    return {name: _with_variables(value, (argument, name)) for name, value in values.items()}


def _with_variables(value: str, place: tuple[str, str]) -> str:
    what, key = ".".join(["environment.args", *place]), ("args", *place)
    try:
        return Template(value).substitute(os.environ)
    except KeyError as error:
        raise SettingsError(
            f"{what} names the variable {error.args[0]!r}, and no such variable is set: export it before the run is "
            "started, or write $$ for a $ that is meant as it stands",
            key=key,
        ) from None
    except ValueError:
        raise SettingsError(
            f"{what} has a $ without the name of a variable: write $NAME or ${{NAME}}, or $$ for a $ that is meant as "
            "it stands",
            key=key,
        ) from None
