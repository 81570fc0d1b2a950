"""The real pipeline, offline: what came of a run's first steps, or made-up groups, from advantages to tensors.

In flow captured or synthetic groups; out flows a table of what each phase costs: wall and CPU time, how many times one
copy of memory that is, what it does to the event loop, and peak memory. Nothing here is a second pipeline: every phase
calls what a run calls.
"""
