"""Values that users' code made, on their way to another process: msgpack of whatever it knows, never pickle.

NumPy's numbers and arrays arrive as plain ones, fractions as floats, tuples and sets as lists, mappings as dicts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.errors import EnvironmentFailed
from tailrace.guards import guarded
from tailrace.records import Json
from tailrace.records.conversation import DEEPEST, is_too_deep
from tailrace.rollouts.attribution import is_mistake, text_of
from tailrace.rollouts.workers.messages import plain_value

_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain_value)
_DECODER = msgspec.msgpack.Decoder()


def pack_values(values: object, what: str) -> bytes:
    """`what` they are, for the message. Raises `EnvironmentFailed` for values that cannot travel.

    >>> unpack_values(pack_values({"seen": (1, 2)}, "the info"))
    {'seen': [1, 2]}
    >>> pack_values({"seen": object()}, "the info")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tailrace.errors.EnvironmentFailed: the info: a object cannot leave a worker process; use numbers, text, ...
    """
    try:
        return _ENCODER.encode(values)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # values are asked to convert themselves, which is users' code
        failed = EnvironmentFailed(f"{what}: {text_of(error)}")
        failed.is_mistake = is_mistake(error)
        raise failed from error


def unpack_values(packed: bytes) -> Any:
    """Raises `CorruptData` for bytes that are none."""
    with guarded("an agent worker sent what are no values"):
        values = _DECODER.decode(packed)
        require_shallow(values)
        return values


def require_shallow(values: Json) -> None:
    """Raise `ValueError` for what nests too deep to be passed on."""
    if is_too_deep(values):
        raise ValueError(f"they nest deeper than {DEEPEST} levels")
