"""Continuous batching over any transformers causal language model, on CPU or CUDA.

`engine` steps; `slots` holds the bookkeeping and decides, without torch, which rows join, move, prefill and decode;
`cache` keeps keys and values by row; `attention` is what the model calls instead of its own; `sampler` draws tokens;
`weights` installs a model state dict. Every forward pass is one packed row of tokens, `[1, num_tokens]`: first the
prompt chunks of joining requests, then one token of each running one. Only attention over the shorter of the running
contexts is padded, and nothing here knows a particular model.
"""

from tailrace.generation.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
