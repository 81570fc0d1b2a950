"""Random numbers by name: the same name gives the same number, in whatever order they are drawn.

So two policies compared on one seed get the same tasks with the same lengths, and a fault that was found repeats.
"""

from __future__ import annotations

from hashlib import blake2b
from statistics import NormalDist

_NORMAL = NormalDist()
_BITS = 53


def uniform(seed: int, *names: object) -> float:
    """In (0, 1).

    >>> uniform(1, "a", 2) == uniform(1, "a", 2) != uniform(2, "a", 2)
    True
    """
    name = "\0".join(map(str, (seed, *names))).encode()
    number = int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> (64 - _BITS)
    return (number + 0.5) / 2.0**_BITS


def standard_normal(seed: int, *names: object) -> float:
    """Of mean 0 and variance 1."""
    return _NORMAL.inv_cdf(uniform(seed, *names))
