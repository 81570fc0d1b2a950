"""An MCP server, as any could be: who sits beside whom. The agent of `mcp_agent.py` starts it for itself.

It is written with the package `mcp` alone and knows nothing of Tailrace.
"""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

NAMES = ["Max", "Ada", "Leo", "Eva", "Tom", "Ben", "Zoe", "Iris", "Paul", "Nina", "Hugo", "Vera", "Sam", "Ruth", "Karl"]
server = MCPServer("seats")


@server.tool()
def sits_by(name: str) -> str:
    """Who sits beside somebody."""
    if name not in NAMES:
        raise ToolError(f"nobody is called {name}; there are: {', '.join(NAMES)}")
    return NAMES[(NAMES.index(name) + 1) % len(NAMES)]


if __name__ == "__main__":
    server.run()
