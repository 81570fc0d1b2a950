"""Prompts to tokens: engines, the thread that steps one, the router over several, the messages to other processes.

In: token ids with sampling settings, and new model state dicts. Out: completions, with the log-probability and the
policy version of every token. Weights are swapped between two engine steps while requests go on. It must never
tokenize, and a request always ends in a completion, a `RequestRefused` or an `EngineFailed`.
"""
