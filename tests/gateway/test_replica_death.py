"""`kill -9` of an inference server under load: the gateway answers every call, and acknowledges none that is lost."""

import asyncio
import re
import subprocess
import sys

import httpx
import pytest

from rllm.store import open_store
from rllm.testing.scripted import TURN_END

from ..ports import free_port

NUM_AGENTS, NUM_TURNS = 12, 8

REPLICA = """
import sys, time
from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer
engine = ScriptedEngine(lambda messages: "answer to " + messages[-1]["content"], latency_s=0.02)
with ScriptedServer(engine, port=int(sys.argv[1])) as server:
    print(server.base_url, flush=True)
    time.sleep(600)
"""


def start_replica(port):
    return subprocess.Popen([sys.executable, "-c", REPLICA, str(port)], stdout=subprocess.PIPE, text=True)


def url_of(replica):
    return replica.stdout.readline().strip()


@pytest.fixture
def replicas():
    """Two processes, started together."""
    started = [start_replica(free_port()) for _ in range(2)]
    yield started
    for replica in started:
        replica.kill()
        replica.wait()
        replica.stdout.close()


def start_gateway(urls, database):
    command = [sys.executable, "-m", "rllm", "gateway", "--port", "0", "--store", f"sqlite:///{database}"]
    for url in urls:
        command += ["--upstream", url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, re.search(r"http://\S+", process.stdout.readline()).group()


async def agent(number, client, acknowledged):
    """Take turns, streamed and not; a stream that breaks off may end with an error, and is requested again."""
    for turn in range(NUM_TURNS):
        question = f"{number}/{turn}"
        body = {"messages": [{"role": "user", "content": question}], "stream": bool(turn % 2)}
        for _ in range(3):
            answer = await client.post(f"/sessions/agent-{number}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            if "data: [DONE]" in answer.text or not turn % 2:
                break
            assert '"error"' in answer.text
        acknowledged[re.search(r'"id":"([^"]+)"', answer.text).group(1)] = (f"agent-{number}", question)


async def run(url, acknowledged, kill):
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        agents = [asyncio.create_task(agent(number, client, acknowledged)) for number in range(NUM_AGENTS)]
        while len(acknowledged) < NUM_AGENTS * NUM_TURNS // 4:
            assert not any(task.done() for task in agents), "an agent ended before the kill"
            await asyncio.sleep(0.005)
        kill()
        await asyncio.gather(*agents)
        return (await client.get("/upstreams")).json()["replicas"]


@pytest.mark.slow
def test_every_call_is_answered_and_acknowledged_calls_are_never_lost(replicas, tmp_path):
    urls = [url_of(replica) for replica in replicas]
    process, url = start_gateway(urls, tmp_path / "traces.db")
    acknowledged = {}
    with process:
        states = asyncio.run(run(url, acknowledged, replicas[0].kill))
        process.terminate()
        process.communicate(timeout=300)
    assert [state["state"] for state in states] == ["down", "up"]
    store = open_store(f"sqlite:///{tmp_path / 'traces.db'}")
    traces = {trace.id: trace for number in range(NUM_AGENTS) for trace in store.by_session(f"agent-{number}")}
    store.close()
    assert len(acknowledged) == NUM_AGENTS * NUM_TURNS
    for trace_id, (session_id, question) in acknowledged.items():
        trace = traces[trace_id]
        assert (trace.session_id, trace.error) == (session_id, None)
        assert trace.response_ids == [*f"answer to {question}".encode(), TURN_END]
    served_by = [
        {
            trace.metadata["rllm.upstream"]["replica"]
            for trace in traces.values()
            if trace.session_id == f"agent-{number}"
        }
        for number in range(NUM_AGENTS)
    ]
    assert all(urls[1] in servers for servers in served_by)
    moved = [trace for trace in traces.values() if trace.metadata["rllm.upstream"].get("retries")]
    assert all(trace.metadata["rllm.upstream"]["replica"] == urls[1] for trace in moved if trace.error is None)


@pytest.mark.slow
def test_calls_are_held_while_the_only_server_is_restarted(replicas, tmp_path):
    [first, _] = replicas
    base_url = url_of(first)
    process, url = start_gateway([base_url], tmp_path / "traces.db")
    acknowledged = {}

    def restart():
        first.kill()
        first.wait()
        replicas.append(start_replica(int(base_url.rpartition(":")[2].removesuffix("/v1"))))

    with process:
        [state] = asyncio.run(run(url, acknowledged, restart))
        process.terminate()
        process.communicate(timeout=300)
    assert (state["state"], len(acknowledged)) == ("up", NUM_AGENTS * NUM_TURNS)
