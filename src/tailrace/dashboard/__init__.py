"""A web page over run folders: what a run did, down to the token, while it runs and afterwards.

    run folder ── readers (incremental, bounded) ──► JSON over HTTP ──► static/: plain ES modules, one a view

A process of its own that only reads files: it writes none, holds none open, takes no lock, and knows neither engines
nor schedulers. A run may be live, finished, or have ended in the middle of a line. What it shows: docs/ui.md.
"""
