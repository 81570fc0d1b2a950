"""Speed on a CPU: native passes, oneDNN's products, fused layers, the allocator's settings.

`engine.speed_up_engine` takes the torch engine's model, `trainer.speed_up_trainer` the trainer's, `memory` tunes
processes. Each is imported in one place, which works without it; `TAILRACE_CPU=off` makes the import fail. Results
change by rounding alone. It must import nothing of generation or training.
"""

import os

if os.environ.get("TAILRACE_CPU") == "off":
    raise ImportError("tailrace.cpu is switched off: TAILRACE_CPU=off", name=__name__)
