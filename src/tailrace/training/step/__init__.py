"""One optimizer step's arithmetic: gradients summed over micro-batches and ranks, loss sums, the optimizer."""
