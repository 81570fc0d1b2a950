"""The processes of a run: started, watched, stopped, and nothing left behind.

In: role specs (a function by its name, and its settings as bytes), shutdown stages, signals. Out: processes that end
when they should, errors that name the role and show the tail of its log, exit codes that tell the truth. It never
knows what a role does: `run` says which roles there are.
"""
