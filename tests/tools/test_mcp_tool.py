import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rllm.errors import ConfigError
from rllm.tools import MultiTool, ToolCall, ToolOutput
from rllm.tools.mcp_tool import MCPServer, MCPTool, mcp_tools

from ..ports import free_port

SCRIPT = str(Path(__file__).with_name("mcp_server_script.py"))
STDIO = MCPServer(name="manners", command=sys.executable, args=[SCRIPT], env={"GREETING": "hello"})


@asynccontextmanager
async def tools_by_name(server: MCPServer, **settings: float) -> AsyncIterator[dict[str, MCPTool]]:
    async with mcp_tools(server, **{"start_timeout_s": 120.0, **settings}) as tools:  # type: ignore[arg-type]
        yield {tool.name: tool for tool in tools}


async def test_tools_of_a_stdio_server_work_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "a-secret-of-the-parent")
    async with tools_by_name(STDIO) as tools:
        assert list(tools) == ["add", "who_is", "greet", "hang", "die", "flood"]
        schema = tools["add"].json["function"]
        assert schema["description"] == "Add two numbers."
        assert schema["parameters"]["required"] == ["a", "b"]
        assert await tools["add"].call({"a": 1, "b": 2}) == ToolOutput("add", output="3")

        pid, greeting, secret = (await tools["who_is"].call({})).to_string().split()
        assert (greeting, secret) == ("hello", "None")

        wrong = await tools["add"].call({"a": "one", "b": 2})
        assert str(wrong.error).startswith("MCP server 'manners', tool 'add' reports: ")
        assert "valid integer" in str(wrong.error)

        waiting = asyncio.create_task(tools["hang"].call({}))
        flood = await tools["flood"].call({})
        assert flood.to_string().endswith("[cut: 980000 of 1000000 characters are left out]")

    assert not psutil.pid_exists(int(pid))
    assert "tool 'hang': the connection is closed" in str((await waiting).error)
    assert "is closed; call tools inside `async with mcp_tools(...)`" in str((await tools["add"].call({})).error)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncIterator[dict[str, MCPTool]]:
    """One server for the tests that do not stop it."""
    async with tools_by_name(STDIO) as tools:
        yield tools


async def test_rollouts_share_a_connection_across_loops_and_threads(tools: dict[str, MCPTool]) -> None:
    both = MultiTool(tools=list(tools.values()))
    here = [both.call(ToolCall("add", {"a": n, "b": n})) for n in range(50)]
    in_threads = [asyncio.to_thread(both, "add", a=n, b=n) for n in range(10)]
    in_other_loops = [asyncio.to_thread(asyncio.run, both.call(ToolCall("add", {"a": n, "b": n}))) for n in range(5)]

    outputs = await asyncio.gather(*here, *in_threads, *in_other_loops)

    assert [output.output for output in outputs] == [str(2 * n) for n in [*range(50), *range(10), *range(5)]]
    assert both("add", a=1, b=1).output == "2"  # blocking the caller's own loop


async def test_hanging_call_is_cancelled_without_affecting_others(tools: dict[str, MCPTool]) -> None:
    await tools["add"].call({"a": 1, "b": 1})
    cancelled = asyncio.create_task(tools["hang"].call({}))
    tools["hang"]._connection.timeout_s = 0.3
    late = await tools["hang"].call({})
    tools["hang"]._connection.timeout_s = 60.0
    cancelled.cancel()

    assert str(late.error).startswith("MCP server 'manners', tool 'hang': no answer within 0.3 s; raise timeout_s")
    assert (await tools["add"].call({"a": 2, "b": 2})).output == "4"


@pytest.fixture
def http_server() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, SCRIPT, str(port)], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


async def listening(url: str) -> None:
    port = int(url.split(":")[2].split("/")[0])
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            await writer.wait_closed()
            return


@pytest.mark.slow
async def test_server_can_be_called_over_http(http_server: str) -> None:
    async with asyncio.timeout(120):
        await listening(http_server)
    spec = {"url": http_server + "?token=secret", "headers": {"x-greeting": "hello"}}
    async with tools_by_name(MCPServer.of(spec)) as tools:
        assert (await tools["add"].call({"a": 1, "b": 2})).output == "3"
        assert (await tools["greet"].call({})).output == "hello"

        died = await tools["die"].call({})
        again = await tools["add"].call({"a": 1, "b": 2})

    assert f"MCP server '{http_server}', tool 'die': the server ended during the call" in str(died.error)
    assert f"MCP server '{http_server}' cannot be reached" in str(again.error)


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"command": "no-such-program"}, "'no-such-program' cannot be started: FileNotFoundError"),
        (
            {"command": sys.executable, "args": ["-c", "raise SystemExit('no licence')"], "name": "dear"},
            "'dear' cannot be started: .*try its command by hand: .*python.* -c .*; its standard error ends: no licence",
        ),
        (
            {"url": "http://127.0.0.1:1/mcp"},
            "cannot be reached: ConnectError.*check that it is running at http://127.0.0.1:1/mcp",
        ),
        ({"comand": "x"}, r"unknown keys \['comand'\]"),
        ({}, "either `command` or `url`"),
    ],
)
async def test_missing_server_is_reported(server: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with mcp_tools(server):
            pass


@pytest.mark.slow
async def test_server_that_never_answers_times_out() -> None:
    silent = {"command": sys.executable, "args": ["-c", "import sys; sys.stdin.read()"], "name": "silent"}

    with pytest.raises(ConfigError, match=r"'silent' cannot be started: no answer within 0.3 s"):
        async with mcp_tools(silent, start_timeout_s=0.3):
            pass
