"""One engine on several ranks in lockstep: every rank is told the same calls in the same order."""
