"""vLLM as an engine: its scheduler, kernels and executors, stepped by our loop in our thread.

In: token ids of prompts, sampling settings, model state dicts. Out: chunks of sampled tokens with the log-probability
and the policy version of each. vLLM's engine core runs inside this process, so that a weight update lies between two
of its steps and every token's version is known; its detokenizer and its output objects are left out, since nothing
here knows text. Nothing here imports vLLM before an engine is built, and nothing outside this package imports it.

    options.py   which options vLLM has, checked without importing it, and what becomes of our settings
    core.py      builds the engine core; what fails is named in our own errors
    requests.py  our requests in vLLM's terms, and the salt that keeps prefix caches of old weights apart
    progress.py  one running request: its unreported tokens in arrays, its times
    weights.py   a model state dict, checked whole, then installed in place
    packing.py   the same on a CPU: packed for its kernels while the engine steps, then exchanged
    engine.py    `VllmEngine`, which implements `Engine` over all that
"""
