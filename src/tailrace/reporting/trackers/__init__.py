"""Experiment trackers: what a run tells wandb, trackio, TensorBoard, MLflow, or one of your own.

    observer ─► hub ─► bounded queue ─► a process for each tracker ─► tracker

A tracker runs in a process of its own, so that one that is slow, down or wrong costs the run nothing: what it does not
take is dropped and counted, one warning says so, and at the end it is waited for until a deadline. A tracker is a class
with a few methods (`Tracker`), found by name, by the entry points of `tailrace.trackers`, or as `module:attribute`.
"""

from tailrace.reporting.trackers.protocol import Histogram, TrackedRun, Tracker

__all__ = ["Histogram", "TrackedRun", "Tracker"]
