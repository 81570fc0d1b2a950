"""Speed on a CPU: native passes, oneDNN's products, fused layers, and how processes use the allocator.

`engine.speed_up_engine` takes the model of the torch engine, `trainer.speed_up_trainer` that of the trainer, and
`memory` tunes processes. Each is imported in one place, which goes on without it where that import fails: nothing may
depend on this room. It changes results by rounding alone, and imports nothing of generation or training.
`TAILRACE_CPU=off` in the environment makes the import fail.
"""

import os

if os.environ.get("TAILRACE_CPU") == "off":
    raise ImportError("tailrace.cpu is switched off: TAILRACE_CPU=off", name=__name__)
