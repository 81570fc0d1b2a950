"""What a run tells people: metrics, readable rollouts, live view, summary, report.

What the scheduler reports (`observer`) and what is read of the run's parts once a step (`gauges`) flow in; lines of
metrics, files of rollouts, snapshots for the live view and the summary's figures flow out. Nothing here waits for a
disk on the event loop, and nothing that goes wrong here reaches the run.

Exports nothing: settings of this room belong to every command, and charts and terminal to few.
"""
