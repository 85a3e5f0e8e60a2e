"""A driver whose rollouts of tasks are on the nodes of a cluster: `python ray_tasks.py ADDRESS TASKS NUM_ROLLOUTS`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.capture import RemoteGateway
from rllm.engine.ray_actors import RayRolloutRunner
from rllm.engine.ray_cluster import joined
from rllm.engine.request import RolloutRequest
from rllm.environments import open_env
from rllm.store.base import TraceStore
from rllm.testing.gateway import scripted_gateway

AGENT = """
import asyncio
from pathlib import Path

CALL = '''
import json, sys, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "done?"}]}).encode()
request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
'''


async def solve(instruction, sandbox, base_url):
    url = await sandbox.open_route(base_url)
    answer = await sandbox.exec(["python3", "-c", CALL, url])
    assert answer.ok, answer.stderr
    while Path(HOLD).exists():
        await sandbox.exec("sleep 1117 > /dev/null 2>&1 &")
        await asyncio.sleep(1)
    await sandbox.exec("echo yes > done")
"""
"""Calls the model from the sandbox, and works on as long as the file `HOLD` exists."""


def rollouts(agent_run_func: Callable[..., object], gateway: RemoteGateway) -> AgentFunctionEngine:
    return AgentFunctionEngine(agent_run_func, gateway=gateway, store=cast("TraceStore", gateway))


def main(address: str, tasks: str, num_rollouts: int, environment: dict[str, str] | None = None) -> list[Any]:
    named = open_env(tasks)
    assert named.agent_run_func is not None
    with joined(address), scripted_gateway(lambda messages: "yes") as gateway:
        remote = RemoteGateway(url=gateway.url, api_key=None)
        opening = partial(rollouts, named.agent_run_func, remote)
        attempts = [
            RolloutRequest(task=named.tasks[number % len(named.tasks)], task_id=f"task-{number}")
            for number in range(num_rollouts)
        ]
        with RayRolloutRunner(opening, gateway=remote, max_concurrent=8, environment=environment) as runner:
            return asyncio.run(runner.run(attempts))


if __name__ == "__main__":
    for episode in main(sys.argv[1], sys.argv[2], int(sys.argv[3])):
        row = [episode.task_id, episode.failed, episode.is_correct, episode.info.get("error")]
        sys.stdout.write(json.dumps(row) + "\n")
