"""What playing rollouts needs to know of the run that they are for, in whichever process they are played."""

from __future__ import annotations

import msgspec


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    max_model_tokens: int | None = None
    """Prompt and completion of one turn together; None: no bound is known."""
    row_tokens: int | None = None
    """What a row of the trainer's holds; None: it has none that are packed here."""
    max_steps: int = 0
    """What reward functions are told."""
    records_experts: bool = False
    """Whether completions come with their routed experts."""
    takes_demonstrations: bool = True
    """Whether agents may demonstrate; not in evaluations."""
