"""What a restricted distribution costs to sample from: 64 tokens of a vocabulary of 49,152, of random logits, one core.

    python benchmarks/sampling.py [--json] [--quick] [--case nucleus-4096 ...]

Least CPU time of the torch engine's sampler over rounds in which the cases take turns, the record of what was kept
(`sampling.returns_supports`) included where training asks for one. `native`: no restriction, by the native pass that an
engine on a CPU takes at its defaults, against which the others are held; left out where kernels cannot be built.
`all`: no restriction, by torch's operations. `nucleus-20`: top-p 0.9 and top-k 20. `nucleus-4096`: top-p 0.95 and the
widest nucleus that training allows. `nucleus`: top-p 0.95 alone, which evaluation may ask for, and which sorts whole
vocabularies. `one-of-64`: as `nucleus-20`, but of one row alone, which takes all rows off the native pass.
"""

from __future__ import annotations

import kit  # isort: skip  - before NumPy: pins threads

import time
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.cpu.kernels import find_kernels
from tailrace.generation.engines.torch.sampler import SampleAll, sample

ROWS, VOCABULARY = 64, 49_152
ROUNDS, QUICK_ROUNDS = 40, 8
CASES = {
    "native": (0, 1.0, 0, False),
    "all": (0, 1.0, 0, False),
    "one-of-64": (1, 0.9, 20, True),
    "nucleus-20": (ROWS, 0.9, 20, True),
    "nucleus-4096": (ROWS, 0.95, 4096, True),
    "nucleus": (ROWS, 0.95, 0, False),
}
"""How many rows are restricted, top-p, top-k, and whether what was kept is returned."""


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    cpu_ms: float
    """Of 64 tokens."""
    over_native: float | None
    """Times what it takes without restriction by the native pass."""
    target: None = None
    met: None = None


def main() -> None:
    options = kit.parse_options(__doc__)
    torch.set_num_threads(1)
    kernels = find_kernels()
    cases = options.choose([case for case in CASES if kernels is not None or case != "native"])
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    least_s = dict.fromkeys(cases, float("inf"))
    for _ in range(QUICK_ROUNDS if options.quick else ROUNDS):
        for case in cases:
            sample_all = None if case == "all" or kernels is None else kernels.sample
            least_s[case] = min(least_s[case], measure(case, logits, sample_all))
    native_s = least_s.get("native")
    rows = [
        Row(case, 1000 * taken_s, None if native_s is None else taken_s / native_s) for case, taken_s in least_s.items()
    ]
    kit.report("Sampling 64 tokens", rows, options)


def measure(case: str, logits: torch.Tensor, sample_all: SampleAll | None) -> float:
    """CPU seconds of one call, as an engine makes it that has this native pass."""
    restricted, top_p, top_k, returns = CASES[case]
    is_restricted = np.arange(ROWS) < restricted
    started = time.process_time()
    sample(
        logits,
        temperatures=np.ones(ROWS, np.float32),
        top_ps=np.where(is_restricted, top_p, 1.0).astype(np.float32),
        top_ks=np.where(is_restricted, top_k, 0).astype(np.int32),
        draws=np.linspace(0.0, 0.99, ROWS),
        returns_supports=is_restricted & returns,
        sample_all=sample_all,
    )
    return time.process_time() - started


if __name__ == "__main__":
    main()
