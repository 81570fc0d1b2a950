"""What the policy is trained on: tasks, and the code that plays and scores them.

In: `EnvironmentSettings` (a name, its arguments, a data set). Out: an `EnvironmentSpec` (task rows, an agent or a
reset/step environment, a reward). An agent sees the policy only as `Policy`. Nothing here tokenizes, schedules or knows
torch, and only `programs/` starts processes; what an environment needs beyond the core is imported when it is loaded.

Your own, in ten lines: `docs/environments.md`.
"""

from tailrace.environments.adapters.mcp import mcp_agent
from tailrace.environments.adapters.mcp_server import McpServer
from tailrace.environments.adapters.openenv import openenv_environment
from tailrace.environments.adapters.openenv_server import OpenEnvServer
from tailrace.environments.adapters.trl import trl_environment
from tailrace.environments.adapters.verifiers import verifiers_environment
from tailrace.environments.datasets import load_rows
from tailrace.environments.judge import JudgeFormat, JudgeSettings
from tailrace.environments.named_rewards import NamedReward
from tailrace.environments.outside import Offer, brought_tasks, outside_agent
from tailrace.environments.programs import ProgramEnd, ProgramLimits, command_agent
from tailrace.environments.protocol import (
    Agent,
    ChatFormat,
    Endpoint,
    Environment,
    EnvironmentFactory,
    EnvironmentSpec,
    Observation,
    Policy,
    ScoreGroup,
)
from tailrace.environments.registry import environment_names, load_environment
from tailrace.environments.results import AgentResult
from tailrace.environments.settings import EnvironmentSettings
from tailrace.environments.single_turn import single_turn_agent
from tailrace.environments.tools import answer_tool_calls
from tailrace.records import Json, Message, Reply, Reward, Task, ToolCall, ToolSpec

__all__ = [
    "Agent",
    "AgentResult",
    "ChatFormat",
    "Endpoint",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentSettings",
    "EnvironmentSpec",
    "Json",
    "JudgeFormat",
    "JudgeSettings",
    "McpServer",
    "Message",
    "NamedReward",
    "Observation",
    "Offer",
    "OpenEnvServer",
    "Policy",
    "ProgramEnd",
    "ProgramLimits",
    "Reply",
    "Reward",
    "ScoreGroup",
    "Task",
    "ToolCall",
    "ToolSpec",
    "answer_tool_calls",
    "brought_tasks",
    "command_agent",
    "environment_names",
    "load_environment",
    "load_rows",
    "mcp_agent",
    "openenv_environment",
    "outside_agent",
    "single_turn_agent",
    "trl_environment",
    "verifiers_environment",
]
