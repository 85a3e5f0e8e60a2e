"""Rollouts of DSPy that share a process, as under the trainer: `python dspy_rollouts.py GATEWAY_URL WAY PACKAGES`.

Prints the calls of each rollout, by its buyer. PACKAGES is a folder with the packages that rllm needs.
"""

from __future__ import annotations

import asyncio
import json
import sys

import agent as example  # examples/frameworks/dspy/agent.py
import dspy

sys.path.append(sys.argv[3])  # after the packages that DSPy was installed with

from rllm.engine.agent_function_engine import AgentFunctionEngine
from rllm.engine.capture import RemoteGateway
from rllm.engine.request import RolloutRequest
from rllm.engine.runner import RolloutRunner

BUYERS = ("Ada", "Bo", "Cy", "Di")
NUM_QUESTIONS = 3


def questions(buyer: str) -> list[str]:
    return [f"{buyer} asks, time {number}: {example.QUESTION}" for number in range(NUM_QUESTIONS)]


def parallel(buyer: str) -> float:
    react = dspy.ReAct("question -> answer", tools=[example.price])
    asked = [(react, {"question": question}) for question in questions(buyer)]
    # With its progress bar, without which DSPy may fail here: see docs/frameworks/dspy.md.
    done = dspy.Parallel(num_threads=2)(asked)
    return float(all("49.05" in item.answer for item in done))


async def gathered(buyer: str) -> float:
    react = dspy.ReAct("question -> answer", tools=[example.price])
    done = await asyncio.gather(*(react.acall(question=question) for question in questions(buyer)))
    return float(all("49.05" in item.answer for item in done))


WAYS = {"parallel": parallel, "gathered": gathered}


async def main(url: str, way: str) -> None:
    gateway = RemoteGateway(url=url, api_key=None)
    attempts = [RolloutRequest(task={"buyer": buyer}, task_id=buyer) for buyer in BUYERS]
    with AgentFunctionEngine(WAYS[way], gateway=gateway, store=gateway) as engine:
        episodes = await RolloutRunner(engine, num_retries=0, max_concurrent=len(BUYERS)).run(attempts)
    for buyer, episode in zip(BUYERS, episodes, strict=True):
        assert not episode.failed, episode.info
        [trajectory] = episode.trajectories
        steps = [{"prompt_ids": step.prompt_ids, "response_ids": step.response_ids} for step in trajectory.steps]
        print()  # after the bars
        print(json.dumps({"buyer": buyer, "reward": trajectory.reward, "steps": steps}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
