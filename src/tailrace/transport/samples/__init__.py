"""Training samples as they are finished, to a trainer that is not ours, and what it tells in return."""
