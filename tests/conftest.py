"""One compute thread per test process, set before anything loads OpenMP, whose every copy reads it once.

Two workers with two threads each on two cores wait for each other; and vLLM's kernels refuse to run in a thread that
counts other threads than the one that planned them.
"""

from __future__ import annotations

import os

from hypothesis import settings as _hypothesis

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

_hypothesis.register_profile("untimed", deadline=None)  # a busy machine makes no property wrong
_hypothesis.load_profile("untimed")
