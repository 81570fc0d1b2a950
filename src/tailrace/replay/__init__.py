"""Measure the pipeline offline: capture what entered it in a run, and run it again, stage by stage.

In: scored groups of a run (`CaptureWriter`), or made-up ones. Out: a capture in the run's folder, and a table of what
each stage costs and does to the event loop. It never trains and never samples.
"""
