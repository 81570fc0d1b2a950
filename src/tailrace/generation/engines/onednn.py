"""Which matrix products oneDNN computes faster than torch's own choice, by kind of processor.

Never decided by a stopwatch: the same machine gives the same bits.
"""

from __future__ import annotations

from pathlib import Path

import torch


def gains_in_float32() -> bool:
    """Whether products of float32 matrices gain: on AMD's processors with AVX-512, where torch takes MKL's."""
    processors = Path("/proc/cpuinfo")
    return (
        torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and has_linear()
        and processors.exists()
        and "AuthenticAMD" in processors.read_text()
    )


def gains_packed(dtype: torch.dtype) -> bool:
    """Whether products with matrices that oneDNN laid out beforehand gain; in bfloat16 torch takes oneDNN anyway."""
    if dtype is torch.bfloat16:
        return has_linear() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 and gains_in_float32()


def has_linear() -> bool:
    """Whether this build of torch offers oneDNN's linear layer."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]
