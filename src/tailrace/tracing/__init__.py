"""Where time goes, and where a process stands: phases, spans, lag of the event loop, tasks, a trace. For every room."""
