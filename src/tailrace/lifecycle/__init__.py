"""The roles of a run: started by launchers, watched, stopped, restarted, and nothing left behind.

In: role specs (a function by its name, its settings as bytes, threads, GPUs, environment), shutdown stages, signals.
Out: handles of roles that end when they should, errors that name the role and show the tail of its log, exit codes
that tell the truth. It never knows what a role does: `run` says which roles there are.
"""
