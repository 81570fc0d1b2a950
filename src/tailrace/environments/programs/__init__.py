"""Agents that are programs: a process for each rollout, which asks the policy over HTTP.

In: a task, and where its policy answers (`Policy.endpoint`). Out: what the rollout earned, once the program and all
that it started have ended. What goes wrong with a program costs one rollout and says why; nothing of it outlives the
rollout, or this process, however that ends.
"""

from tailrace.environments.programs.agent import CommandAgent, command_agent
from tailrace.environments.programs.process import ProgramLimits
from tailrace.environments.programs.rewards import ProgramEnd

__all__ = ["CommandAgent", "ProgramEnd", "ProgramLimits", "command_agent"]
