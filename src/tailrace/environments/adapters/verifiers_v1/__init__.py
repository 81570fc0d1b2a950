"""Environments of verifiers 0.4 (its second API: tasksets, harnesses, an environment server), as they are.

verifiers 0.4 does not go beside Tailrace's own needs, so it lives in a virtual environment of its own, and its server
runs there as a child process (`host.py`, which imports nothing of Tailrace). It plays and scores; what its agent
samples it asks the rollout's policy for, tokens in and tokens out, so that what is trained on is what was sampled.
"""
