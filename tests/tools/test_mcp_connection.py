import asyncio
import sys
from pathlib import Path

from rllm.tools.mcp_tool import MCPServer

from .test_mcp_tool import tools_by_name

RAW = str(Path(__file__).with_name("raw_mcp_server.py"))
STDIO = MCPServer(name="raw", command=sys.executable, args=[RAW])


async def test_what_is_not_unicode_on_a_servers_output_harms_no_call() -> None:
    async with tools_by_name(STDIO) as tools:
        pid = (await tools["pid"].call({})).output

        assert (await tools["noise"].call({})).output == pid
        assert (await tools["pid"].call({})).output == pid


async def test_an_error_of_one_call_ends_no_other_call() -> None:
    async with tools_by_name(STDIO, timeout_s=600.0) as tools:
        waiting = asyncio.create_task(tools["hang"].call({}))
        pid = (await tools["pid"].call({})).output

        busy = await tools["busy"].call({})

        assert busy.error == "MCP server 'raw', tool 'busy': MCPError: 10 calls a minute are allowed"
        assert (await tools["pid"].call({})).output == pid
        assert not waiting.done()
