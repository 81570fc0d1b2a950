"""The thread that owns an engine: it decides, steps and loads weights; the event loop hands it requests."""
