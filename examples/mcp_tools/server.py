"""An MCP server that knows where parcels are: `python server.py` speaks over its standard input and output."""

import random

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

_rng = random.Random(0)
VANS = range(10, 100)
VAN_OF = {parcel: _rng.choice(VANS) for parcel in _rng.sample(range(1000, 10000), 1000)}
MINUTES = {van: _rng.randrange(10, 100) for van in VANS}

server = MCPServer("parcels", log_level="CRITICAL")


@server.tool()
def locate(parcel: int) -> str:
    """Return the van that carries the parcel."""
    if parcel not in VAN_OF:
        raise ToolError(f"there is no parcel {parcel}")
    return f"van {VAN_OF[parcel]}"


@server.tool()
def arrival(van: int) -> str:
    """When it comes."""
    if van not in MINUTES:
        raise ToolError(f"there is no van {van}")
    return f"in {MINUTES[van]} minutes"


if __name__ == "__main__":
    server.run("stdio")
