import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from rllm.errors import ConfigError, RLLMError
from rllm.tools import MultiTool
from rllm.tools.mcp_tool import MCPConnection, MCPServer, MCPTool, mcp_tools

from ..ports import free_port
from ..waiting import wait_for
from .raw_mcp_server import NUM_MEETING
from .test_mcp_tool import listening, tools_by_name

RAW = str(Path(__file__).with_name("raw_mcp_server.py"))
STDIO = MCPServer(name="raw", command=sys.executable, args=[RAW])


def wait_for_lines(file: Path, number: int) -> None:
    while len(file.read_text().splitlines()) < number:
        time.sleep(0.01)


async def test_invalid_unicode_in_server_output_does_not_break_calls() -> None:
    async with tools_by_name(STDIO) as tools:
        pid = (await tools["pid"].call({})).output

        assert (await tools["noise"].call({})).output == pid
        assert (await tools["pid"].call({})).output == pid


async def test_error_of_one_call_does_not_end_others() -> None:
    async with tools_by_name(STDIO, timeout_s=600.0) as tools:
        waiting = asyncio.create_task(tools["hang"].call({}))
        pid = (await tools["pid"].call({})).output

        busy = await tools["busy"].call({})

        assert busy.error == "MCP server 'raw', tool 'busy': MCPError: 10 calls a minute are allowed"
        assert (await tools["pid"].call({})).output == pid
        assert not waiting.done()


async def test_dead_server_is_reported_and_reconnected() -> None:
    async with tools_by_name(STDIO) as tools:
        waiting = asyncio.create_task(tools["hang"].call({}))
        await tools["pid"].call({})

        died = await tools["die"].call({})

        assert died.error == (
            "MCP server 'raw', tool 'die': the server ended during the call; "
            "the next call connects again; its standard error ends: dying words"
        )
        assert "tool 'hang': the server ended during the call" in str((await waiting).error)

        pid = int((await tools["pid"].call({})).to_string())  # a new process
        waiting = asyncio.create_task(tools["hang"].call({}))
        await tools["pid"].call({})
        os.kill(pid, signal.SIGKILL)

        assert "tool 'hang': the server ended during the call" in str((await waiting).error)
        assert (await tools["pid"].call({})).error is None


async def test_calls_share_a_reconnection_attempt(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with tools_by_name(replace(STDIO, env={"ONCE": str(starts)})) as tools:
        tools["pid"]._connection.start_timeout_s = 1.0
        os.kill(int((await tools["pid"].call({})).to_string()), signal.SIGKILL)
        assert "the server ended" in str((await tools["pid"].call({})).error)

        outputs = await asyncio.gather(*(tools["pid"].call({}) for _ in range(20)))

    assert all("'raw' cannot be started: no answer within 1 s" in str(output.error) for output in outputs)
    assert len(starts.read_text().splitlines()) <= 3  # and not one for each call


LASTING = "import time; open('started', 'w'); time.sleep(20); open('survived', 'w')"


async def test_closing_ends_a_server_whose_start_times_out_meanwhile(tmp_path: Path) -> None:
    import_module("mcp.client.streamable_http")  # which takes longer than the start may
    server = MCPServer(command=sys.executable, args=["-c", LASTING], cwd=str(tmp_path))
    connection = MCPConnection(server, timeout_s=60.0, start_timeout_s=1.0)
    waiting = asyncio.create_task(connection.list_tools())
    await asyncio.to_thread(wait_for, lambda: waiting.done() or (tmp_path / "started").exists())
    await asyncio.to_thread(connection.close)  # which takes two seconds, as the server does not end by itself
    with pytest.raises((RLLMError, ConfigError)):
        await waiting
    assert not (tmp_path / "survived").exists()


async def test_closing_ends_a_connection_attempt(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with tools_by_name(replace(STDIO, env={"ONCE": str(starts)})) as tools:
        os.kill(int((await tools["pid"].call({})).to_string()), signal.SIGKILL)
        assert "the server ended" in str((await tools["pid"].call({})).error)
        waiting = asyncio.create_task(tools["pid"].call({}))
        await asyncio.to_thread(wait_for_lines, starts, 2)

    assert "the connection is closed" in str((await waiting).error)
    assert not psutil.pid_exists(int(starts.read_text().splitlines()[1]))


@contextmanager
def http_server(**env: str) -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, RAW, str(port)], env={**os.environ, **env}) as process:
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@asynccontextmanager
async def http_tools(headers: dict[str, str] | None = None, **env: str) -> AsyncIterator[dict[str, MCPTool]]:
    with http_server(**env) as url:
        async with asyncio.timeout(120):
            await listening(url)
        async with tools_by_name(MCPServer(url=url, headers=headers or {})) as tools:
            yield tools


async def test_calls_over_http_run_concurrently() -> None:
    async with http_tools() as tools:
        outputs = await asyncio.gather(*(tools["meet"].call({}) for _ in range(NUM_MEETING)))

        assert [output.error for output in outputs] == [None] * NUM_MEETING


@pytest.mark.parametrize("status", ["404", "400"])
async def test_server_that_lost_its_sessions_is_reconnected(status: str) -> None:
    async with http_tools(STATUS=status) as tools:
        await tools["forget"].call({})

        forgotten = await tools["pid"].call({})

        assert "the next call connects again" in str(forgotten.error)
        assert (await tools["pid"].call({})).error is None


async def test_wrong_key_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"it refuses these `headers` with HTTP status 401: .*the key is wrong"):
        async with http_tools({"x-key": "wrong"}):
            pass


async def test_tools_with_equal_names_are_numbered() -> None:
    async with mcp_tools(STDIO, start_timeout_s=120.0) as tools:
        names = list(MultiTool(tools=tools).tools)

        assert names[-4:] == ["look_up", "look_up_2", "__", "___2"]
        assert (await tools[-3].call({})).output == "look_up"
        assert (await tools[-1].call({})).output == "計算"


async def test_unserializable_arguments_do_not_end_other_calls() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    async with tools_by_name(STDIO, timeout_s=600.0) as tools:
        waiting = asyncio.create_task(tools["hang"].call({}))
        pid = (await tools["pid"].call({})).output

        half, nested = await tools["busy"].call({"x": "\ud83d"}), await tools["busy"].call({"x": deep})

        assert "tool 'busy': the arguments cannot be sent: " in str(half.error)
        assert "tool 'busy': the arguments cannot be sent: " in str(nested.error)
        assert (await tools["pid"].call({})).output == pid
        assert not waiting.done()
