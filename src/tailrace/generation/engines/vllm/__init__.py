"""vLLM as an engine: its scheduler, kernels and executors, stepped by our loop in our thread.

In: token ids, sampling settings, model state dicts. Out: chunks of sampled tokens with log-probabilities and policy
versions. vLLM's engine core runs in this process, so that a weight update lies between two of its steps. vLLM is
imported only when an engine is built, and nowhere outside this package.
"""
