"""Prompts to tokens: an engine, the thread that steps it, and the way to it from another process.

In: token ids of a prompt with sampling settings, and now and then a new model state dict. Out: completions, whose every
token carries its log-probability and the policy version that sampled it. Weights are swapped between two engine steps
while requests go on. It must never tokenize, never stamp a version at receipt, and never hold a request back without
telling: a request ends in a completion, a `RequestRefused` or an `EngineFailed`.

    await generate(...) → inbox → [engine thread: close? load? step] → futures of the event loop
"""
