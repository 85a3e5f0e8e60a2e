"""docs/gateway.md names existing options, commands, routes and metrics."""

import re
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

from rllm.cli import app
from rllm.gateway.app import create_app
from rllm.gateway.config import PoolConfig
from rllm.gateway.upstream import HTTPUpstream, UpstreamPool
from rllm.store.memory import MemoryTraceStore

TEXT = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()


def options(*names):
    command = get_command(app)
    for name in names:
        command = command.get_command(None, name)
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("option", sorted(set(re.findall(r"--[a-z][a-z-]+", TEXT))))
def test_documented_options_exist(option):
    assert option in options("gateway")


@pytest.mark.parametrize("command", re.findall(r"^rllm (traces|store) (\w+)", TEXT, re.MULTILINE))
def test_documented_commands_exist(command):
    assert options(*command)


async def test_documented_routes_exist():
    pool = UpstreamPool(["http://127.0.0.1:9/v1"], HTTPUpstream, PoolConfig())
    transport = httpx.ASGITransport(create_app(MemoryTraceStore(), pool))
    named = re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", TEXT)
    assert len(named) >= 16
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for method, path in named:
            answer = await client.request(method, re.sub(r"\{(\w+)\}|ID", "1", path))
            assert answer.status_code != 405, path
            assert answer.status_code != 404 or answer.json()["error"]["code"] != "not_found", path
    await pool.close()


async def test_documented_metrics_are_the_exported_ones():
    pool = UpstreamPool(["http://127.0.0.1:9/v1"], HTTPUpstream, PoolConfig())
    pool.publish(1)
    transport = httpx.ASGITransport(create_app(MemoryTraceStore(), pool))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        given = set(re.findall(r"^# TYPE rllm_gateway_(\w+)", (await client.get("/metrics")).text, re.MULTILINE))
    table = TEXT.partition("`rllm_gateway_`")[2].partition("`--otel`")[0]
    found = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(found))) == {name for name in given if not name.endswith("_created")}
    await pool.close()
