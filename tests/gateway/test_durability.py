"""`kill -9` of the gateway at any time loses no call whose answer an agent has read."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from rllm.store import open_store
from rllm.testing.scripted import TURN_END, ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

NUM_AGENTS = 16


@pytest.fixture
def upstream():
    with ScriptedServer(ScriptedEngine(lambda messages: f"answer to {messages[-1]['content']}")) as server:
        yield server


def start_gateway(upstream, database):
    command = [sys.executable, "-m", "rllm", "gateway", "--upstream", upstream.base_url, "--port", "0"]
    process = subprocess.Popen([*command, "--store", f"sqlite:///{database}"], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    return process, re.search(r"http://\S+", line).group()


async def agent(number, client, acknowledged):
    """Send calls, streamed and not, until the gateway is gone; record each answer that was read to the end."""
    for turn in range(10_000):
        question = f"{number}/{turn}"
        body = {"messages": [{"role": "user", "content": question}], "stream": bool(turn % 2)}
        try:
            answer = await client.post(f"/sessions/agent-{number}/v1/chat/completions", json=body)
        except httpx.TransportError:
            return
        assert answer.status_code == 200, answer.text
        if turn % 2:
            assert answer.text.endswith("data: [DONE]\n\n")
        acknowledged[re.search(r'"id":"([^"]+)"', answer.text).group(1)] = (f"agent-{number}", question)


async def run_until_killed(url, process, acknowledged, *, num_calls):
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        agents = [asyncio.create_task(agent(number, client, acknowledged)) for number in range(NUM_AGENTS)]
        while len(acknowledged) < num_calls:
            assert not all(task.done() for task in agents), "the agents ended before the kill"
            await asyncio.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.gather(*agents)


@pytest.mark.slow
def test_acknowledged_calls_are_never_lost(upstream, tmp_path):
    database = tmp_path / "traces.db"
    acknowledged = {}
    for round_number in range(1, 3):
        process, url = start_gateway(upstream, database)
        with process:
            asyncio.run(run_until_killed(url, process, acknowledged, num_calls=60 * round_number))
    store = open_store(f"sqlite:///{database}")
    traces = {trace.id: trace for number in range(NUM_AGENTS) for trace in store.by_session(f"agent-{number}")}
    store.close()
    assert len(acknowledged) >= 120
    for trace_id, (session_id, question) in acknowledged.items():
        trace = traces[trace_id]
        assert trace.session_id == session_id
        assert trace.response_ids == [*f"answer to {question}".encode(), TURN_END]
        assert len(trace.logprobs) == len(trace.response_ids)
