"""The thread that owns an engine: it decides, steps and loads weights; the event loop hands it requests.

In: requests, interruptions and opened model state dicts, through an inbox. Out: chunks and completions, one wake-up of
the event loop per step. Only that thread may touch the engine, and it must never await or wait for the event loop.
"""
