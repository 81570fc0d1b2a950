"""The composition root: the one room that knows all the parts and wires a run.

Settings flow in, a run's folder and an exit code flow out. Roles are built from settings alone, wherever they live; no
policy is decided here.
"""
