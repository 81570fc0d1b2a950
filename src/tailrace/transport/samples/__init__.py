"""Training samples one at a time, to a trainer that is not ours, and what it tells in return."""
