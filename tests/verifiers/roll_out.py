"""Roll out each task of a named environment with a scripted model, two at a time, and print its result as a JSON line.

python roll_out.py SPEC
"""

import asyncio
import json
import sys

from rllm.environments import open_env
from rllm.errors import RolloutError
from rllm.testing import scripted_gateway


async def main(spec: str) -> None:
    opened = open_env(spec)
    with scripted_gateway(lambda messages: messages[-1]["content"].replace("Say red", "It is red")) as gateway:
        for task in opened.tasks:
            try:
                episode = await gateway.rollout_async(opened.agent_run_func, task)
            except RolloutError as error:
                print(json.dumps({"task": task["id"], "error": str(error)}))
            else:
                [trajectory] = episode.trajectories
                step = trajectory.steps[-1]
                answer = {"tokens": len(step.response_ids), "answer": step.model_response}
                print(
                    json.dumps({"task": task["id"], "reward": trajectory.reward, **answer, "metrics": episode.metrics})
                )


asyncio.run(main(sys.argv[1]))
