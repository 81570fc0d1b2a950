"""Arrays within messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailrace.records import Float32Array, Int32Array
from tailrace.transport.channels import decode_array


@pytest.mark.parametrize(
    ("declared", "scalar"),
    [
        (Int32Array, np.int32),
        (Float32Array, np.float32),
        (np.ndarray[tuple[Any, ...], np.dtype[np.int32]], np.int32),  # what msgspec makes of NDArray from numpy 2.5 on
        (np.ndarray[tuple[Any, ...], np.dtype[np.float32]], np.float32),
    ],
)
def test_an_array_is_known_by_what_its_field_declares(declared: object, scalar: type[np.generic]) -> None:
    numbers = np.array([1, 2, 3], scalar)
    decoded = decode_array(declared, numbers.tobytes())
    assert decoded.dtype == scalar
    assert np.array_equal(decoded, numbers)
    assert not decoded.flags.writeable
