"""Engines turn token ids into sampled tokens, one synchronous step at a time, each owned by one thread.

`protocol` is what every engine promises; `torch` runs any transformers causal language model on CPU or CUDA, `vllm`
runs vLLM, `simulated` needs no model. Nothing here awaits, schedules rollouts, or knows text.
"""
