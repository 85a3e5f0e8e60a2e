"""Measure how much a second try helps an untrained model: `python examples/workflow_retry/retries.py [MODEL]`."""

from __future__ import annotations

import asyncio
import sys

import agent
import offline

from rllm.engine.agent_workflow_engine import AgentWorkflowEngine
from rllm.inference.local import LocalEngine, load_model


async def main(model: str) -> None:
    """Print the accuracy with one try, two and three."""
    loaded = load_model(model)
    policy = LocalEngine(loaded.model, loaded.tokenizer)
    _, held_out = offline.tasks(seed=0)
    for max_tries in (1, 2, 3):
        engine = AgentWorkflowEngine(agent.ProposeAndCheck, {"max_tries": max_tries}, rollout_engine=policy)
        episodes = await engine.execute_tasks(held_out)
        right = sum(episode.is_correct for episode in episodes)
        tries = sum(episode.metrics["num_tries"] for episode in episodes)
        print(f"at most {max_tries}: {right / len(episodes):.0%} right, {tries / len(episodes):.2f} tries on average")
    policy.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(offline.policy())))
