"""What a run goes on from: folders written whole or not at all, the optimizer's moments in them, copies on the host.

All ranks write, any number of ranks reads. A folder without its manifest is no checkpoint.
"""
