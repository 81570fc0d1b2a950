"""What an agent asks of one turn, as plain values that can travel; anything else is refused in its own call.

A value that cannot be sent, or be read where it arrives, would cost every rollout whose requests share a message.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import SupportsIndex, cast

import numpy as np

from tailrace.records import Int32Array, as_token_ids
from tailrace.records.sampling import LEAST_TEMPERATURE

_MOST_TOKEN_ID = int(np.iinfo(np.int32).max)


class InvalidArgument(ValueError):
    """A policy is asked for what no turn can do: by wrong code, so that waiting mends nothing."""


def plain_options(max_tokens: object, temperature: object, seed: object) -> tuple[int | None, float | None, int | None]:
    """The three as Python's own numbers; None stays None.

    Raises `TypeError` for what is no such number, and `InvalidArgument` for one that no turn can have.

    >>> plain_options(np.int64(8), np.float32(0.5), None)
    (8, 0.5, None)
    """
    return (
        None if max_tokens is None else _num_tokens(max_tokens),
        None if temperature is None else _temperature(temperature),
        None if seed is None else _whole_number("seed", seed),
    )


def plain_stop_token_ids(asked: Iterable[object]) -> tuple[int, ...]:
    """Token ids that end a completion. Raises as `plain_options` does."""
    token_ids = tuple(_whole_number("stop_token_ids", one) for one in asked)
    if strange := [one for one in token_ids if not 0 <= one <= _MOST_TOKEN_ID]:
        raise InvalidArgument(f"continue_tokens(stop_token_ids) holds {strange[0]}, which no token has as its id")
    return token_ids


def plain_token_ids(asked: object) -> Int32Array:
    """Token ids of a prompt: [num_tokens]. Raises as `plain_options` does."""
    given = np.asarray(asked)
    if given.dtype == np.int32 and given.ndim == 1:
        return given
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(
            f"continue_tokens(token_ids) takes whole numbers, [num_tokens]; it was given {given.dtype} "
            f"{list(given.shape)}"
        )
    if given.size and not 0 <= given.min() <= given.max() <= _MOST_TOKEN_ID:
        raise InvalidArgument("continue_tokens(token_ids) holds numbers that no token has as its id")
    return as_token_ids(given)


def stop_strings(stop: object) -> list[str]:
    """One string, or several, at which a reply ends; none where `stop` is None or empty.

    Raises `TypeError` for what is no string, and `InvalidArgument` for an empty one among them.
    """
    if stop is None or isinstance(stop, str):
        return [stop] if stop else []
    given: list[object] = list(stop) if isinstance(stop, Iterable) else [stop]
    strings = [one for one in given if isinstance(one, str)]
    if len(strings) < len(given):
        raise TypeError(f"chat(stop={stop!r}) takes a string, or several")
    if not all(strings):
        raise InvalidArgument(f"chat(stop={strings}): an empty string ends every reply before it begins")
    return strings


def _num_tokens(asked: object) -> int:
    number = _whole_number("max_tokens", asked)
    if number < 1:
        raise InvalidArgument(f"chat(max_tokens={number}) asks for no token; it must be 1 or above")
    return number


def _whole_number(name: str, asked: object) -> int:
    try:
        if not isinstance(asked, bool):
            return operator.index(cast(SupportsIndex, asked))
    except TypeError:
        pass
    raise TypeError(f"chat({name}={asked!r}) takes whole numbers: 100 // 2 is one, 100 / 2 is not")


def _temperature(asked: object) -> float:
    if isinstance(asked, bool) or not isinstance(asked, Real):
        raise TypeError(f"chat(temperature={asked!r}) takes a number")
    number = float(asked)
    if not (number >= LEAST_TEMPERATURE and math.isfinite(number)):
        raise InvalidArgument(
            f"chat(temperature={number}): what is trained on is sampled at a temperature of {LEAST_TEMPERATURE:g} or "
            "above, and a finite one"
        )
    return number
