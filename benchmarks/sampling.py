"""What a restricted distribution costs to sample from: 64 tokens of a vocabulary of 49,152, of random logits, one core.

    python benchmarks/sampling.py [--json] [--quick] [--case nucleus-4096 ...]

Least CPU time of the torch engine's sampler over rounds in which the cases take turns, the record of what was kept
(`sampling.returns_supports`) included where training asks for one. `all`: no restriction, by torch's operations (the
native pass is faster). `nucleus-20`: top-p 0.9 and top-k 20. `nucleus-4096`: top-p 0.95 and the widest nucleus that
training allows. `nucleus`: top-p 0.95 alone, which evaluation may ask for, and which sorts whole vocabularies.
"""

from __future__ import annotations

import kit  # isort: skip  - before NumPy: pins threads

import time
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.generation.engines.torch.sampler import sample

ROWS, VOCABULARY = 64, 49_152
ROUNDS, QUICK_ROUNDS = 40, 8
CASES = {
    "all": (1.0, 0, False),
    "nucleus-20": (0.9, 20, True),
    "nucleus-4096": (0.95, 4096, True),
    "nucleus": (0.95, 0, False),
}
"""Top-p, top-k, and whether what was kept is returned."""


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    cpu_ms: float
    """Of 64 tokens."""
    over_all: float | None
    """Times what it takes without restriction."""
    target: None = None
    met: None = None


def main() -> None:
    options = kit.parse_options(__doc__)
    torch.set_num_threads(1)
    cases = options.choose(list(CASES))
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    least_s = dict.fromkeys(cases, float("inf"))
    for _ in range(QUICK_ROUNDS if options.quick else ROUNDS):
        for case in cases:
            least_s[case] = min(least_s[case], measure(case, logits))
    whole_s = least_s.get("all")
    rows = [
        Row(case, 1000 * taken_s, None if whole_s is None else taken_s / whole_s) for case, taken_s in least_s.items()
    ]
    kit.report("Sampling 64 tokens", rows, options)


def measure(case: str, logits: torch.Tensor) -> float:
    """CPU seconds of one call."""
    top_p, top_k, returns = CASES[case]
    started = time.process_time()
    sample(
        logits,
        temperatures=np.ones(ROWS, np.float32),
        top_ps=np.full(ROWS, top_p, np.float32),
        top_ks=np.full(ROWS, top_k, np.int32),
        draws=np.linspace(0.0, 0.99, ROWS),
        returns_supports=np.full(ROWS, returns),
    )
    return time.process_time() - started


if __name__ == "__main__":
    main()
