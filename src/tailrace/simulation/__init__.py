"""The real scheduler in virtual time, over modelled engines and a modelled trainer.

In: a plan of the hardware and the load. Out: throughput, staleness, bias, and what waited for what. Scheduler,
rollouter, router, batching and ledger are those of a run; only what takes hardware is modelled. Nothing here may read
a wall clock or draw from an unseeded generator: the same seed gives the same run, event for event.
"""

from tailrace.simulation.run import SimulatedRun, Simulation, simulate
from tailrace.simulation.settings import SimulationPlan
from tailrace.simulation.virtual_time import run_in_virtual_time

__all__ = ["SimulatedRun", "Simulation", "SimulationPlan", "run_in_virtual_time", "simulate"]
