"""Cost of orchestration: three-step rollouts of an agent in an environment, and of a workflow, with a model that takes no time.

    python benchmarks/rollouts.py [--json]

Each row is a separate process: rollouts per second, CPU microseconds per rollout, and the memory of each running
rollout when all of them are held in the middle of their second step. `blocking` is an environment with ordinary
methods, which run in threads; `async` one with coroutines; `workflow` does the three calls itself. The baseline,
`bare`, is a coroutine that makes the same calls to the same engine, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from typing import Any

import psutil

from rllm.agents.agent import Action, BaseAgent, Step, Trajectory
from rllm.engine.agent_execution_engine import AgentExecutionEngine
from rllm.engine.agent_workflow_engine import AgentWorkflowEngine
from rllm.environments.base.base_env import BaseEnv
from rllm.inference.engine import ModelOutput
from rllm.workflows.workflow import Workflow

KINDS = ("bare", "async", "blocking", "workflow")
CONCURRENT = (1, 64, 1024, 10_000)
NUM_STEPS = 3
LEAST_ROLLOUTS = 2000
PROMPT, ANSWER = list(range(64)), list(range(16))
LOGPROBS = [-0.5] * len(ANSWER)


class Hold:
    """Barrier at which second steps wait until all of them have arrived and `release` is set."""

    def __init__(self, size: int) -> None:
        self.missing = size
        self.full, self.release = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.full.set()
        await self.release.wait()


hold: Hold | None = None


class InstantEngine:
    """Engine that answers at once, always with the same tokens."""

    async def get_model_response(self, messages: Any, *, tools: Any = None, **params: Any) -> ModelOutput:
        return ModelOutput(text="on", content="on", prompt_ids=PROMPT, completion_ids=ANSWER, logprobs=LOGPROBS)


async def maybe_hold(turn: int) -> None:
    if hold is not None and turn == 1:
        await hold.wait()


class Walker(BaseAgent):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.path = Trajectory()

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self.messages

    @property
    def trajectory(self) -> Trajectory:
        return self.path

    def update_from_env(self, observation: Any, reward: Any, done: bool, info: dict[str, Any]) -> None:
        self.messages = [*self.messages, {"role": "user", "content": observation}]

    def update_from_model(self, response: str) -> Action:
        self.messages = [*self.messages, {"role": "assistant", "content": response}]
        self.path.steps.append(Step(action=response))
        return Action(response)


class Path(BaseEnv):
    def __init__(self) -> None:
        self.turn = 0

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "go", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        return "go on", float(self.turn == NUM_STEPS), self.turn == NUM_STEPS, {}

    @staticmethod
    def from_dict(info: Any) -> Path:
        return Path()


class AsyncPath(Path):
    async def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return "go", {}

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:  # type: ignore[override]
        await maybe_hold(self.turn)
        return super().step(action)

    @staticmethod
    def from_dict(info: Any) -> Path:
        return AsyncPath()


class ThreeCalls(Workflow):
    async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
        messages: list[dict[str, Any]] = []
        path = Trajectory(reward=1.0)
        for turn in range(NUM_STEPS):
            await maybe_hold(turn)
            messages = [*messages, {"role": "user", "content": "go"}]
            output = await self.rollout_engine.get_model_response(messages)
            messages = [*messages, output.to_message()]
            path.steps.append(Step.from_model_output(output, messages[:-1]))
        self.commit("walker", trajectory=path)


async def bare_rollout(model: InstantEngine) -> float:
    messages: list[dict[str, Any]] = []
    for turn in range(NUM_STEPS):
        await maybe_hold(turn)
        messages = [*messages, {"role": "user", "content": "go"}]
        output = await model.get_model_response(messages)
        messages = [*messages, output.to_message()]
    return 1.0


async def run(kind: str, concurrent: int, num_rollouts: int) -> None:
    tasks = [{"number": number} for number in range(num_rollouts)]
    if kind == "bare":
        model, places = InstantEngine(), asyncio.Semaphore(concurrent)

        async def bounded() -> float:
            async with places:
                return await bare_rollout(model)

        rewards = await asyncio.gather(*(bounded() for _ in tasks))
    elif kind == "workflow":
        engine = AgentWorkflowEngine(ThreeCalls, rollout_engine=InstantEngine(), n_parallel_tasks=concurrent)
        rewards = [episode.trajectories[0].reward for episode in await engine.execute_tasks(tasks)]
    else:
        stepping = AgentExecutionEngine(
            agent_class=Walker,
            env_class=AsyncPath if kind == "async" else Path,
            rollout_engine=InstantEngine(),
            n_parallel_agents=concurrent,
        )
        rewards = [path.reward for path in await stepping.execute_tasks(tasks)]
    assert rewards == [1.0] * num_rollouts, "a rollout was lost"


async def memory_of(kind: str, concurrent: int) -> float | None:
    """Return the kilobytes that each running rollout adds; `None` for threads, which cannot be held."""
    global hold
    if kind == "blocking":
        return None
    hold = Hold(concurrent)
    gc.collect()
    before = psutil.Process().memory_info().rss
    running = asyncio.create_task(run(kind, concurrent, concurrent))
    await hold.full.wait()
    gc.collect()
    added = psutil.Process().memory_info().rss - before
    hold.release.set()
    await running
    hold = None
    return added / concurrent / 1000


def measure(kind: str, concurrent: int) -> dict[str, Any]:
    memory = asyncio.run(memory_of(kind, concurrent)) if concurrent >= 1000 else None
    num_rollouts = max(concurrent, LEAST_ROLLOUTS)
    asyncio.run(run(kind, concurrent, min(concurrent, 100)))  # does one-time work
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(run(kind, concurrent, num_rollouts))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "kind": kind,
        "concurrent": concurrent,
        "rollouts_per_s": num_rollouts / wall,
        "cpu_us": 1e6 * cpu / num_rollouts,
        "kb_each": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--row", nargs=2, metavar=("KIND", "CONCURRENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(arguments.row[0], int(arguments.row[1]))))
        return
    rows = []
    for kind in KINDS:
        for concurrent in CONCURRENT:
            command = [sys.executable, __file__, "--row", kind, str(concurrent)]
            row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
            rows.append(row)
            if not arguments.json:
                memory = f"{row['kb_each']:7.1f} KB each" if row["kb_each"] is not None else ""
                print(
                    f"{kind:>9} {concurrent:6,} at once: {row['rollouts_per_s']:7,.0f} rollouts/s"
                    f" {row['cpu_us']:6.0f} us of CPU each  {memory}"
                )
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
