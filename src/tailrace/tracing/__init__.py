"""Where time goes: phases, spans, lag of the event loop, watched tasks, a trace. Every room may call it."""
