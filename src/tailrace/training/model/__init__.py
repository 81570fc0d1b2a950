"""The policy's model as the trainer runs it: made, wrapped and sharded, up to log-probabilities of given tokens.

In: a model folder, settings, micro-batches. Out: hidden states, and through the head log-probabilities and entropies,
never a whole tensor of logits. Adapters, the reference model, replayed routers, checkpointed, offloaded and compiled
layers belong to it. It never sees a loss' settings or an optimizer.
"""
