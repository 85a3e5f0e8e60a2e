"""A user's project whose rollouts run on Ray, and the files of its runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

AGENT = """
import os, time
from openai import OpenAI

from wording import question_of  # a neighbour

client = OpenAI()  # made before any rollout


def answer(word, log, sleep=0.0):
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question_of(word)}])
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {os.getcwd()}\\n")
    time.sleep(sleep)
    return float(len(answer.choices[0].message.content or "") % 2)
"""
GAME = """
import os
import gymnasium


class Guess(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, log):
        self.log = log

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {os.getcwd()}\\n")
        return 0, float(action % 2), True, False, {}


gymnasium.register("Guess-v0", entry_point=Guess)


def guess(env, base_url, **task):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    observed = {"role": "user", "content": env.reset()[0]}
    answer = client.chat.completions.create(model="any", messages=[observed]).choices[0].message.content
    return env.step(str(len(answer)))[1]
"""
SCRIPT = """
import os, sys
from rllm.agents.chat_agent import ChatAgent
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.trainer import AgentTrainer
from rllm.workflows.simple_workflow import SimpleWorkflow


def reward(task, answer):
    with open(task["log"], "a") as file:
        file.write(f"{os.getpid()} {os.getcwd()}\\n")
    return float(len(answer) % 2)


class Speaker(ChatAgent):
    def response_to_action(self, response):
        return response


def own_client(question, log, base_url):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
    return reward({"log": log}, answer.choices[0].message.content or "")


DOORS = {
    "function": {"agent_run_func": own_client},
    "agent": {"agent_class": Speaker, "env_class": SingleTurnEnvironment, "env_args": {"reward_fn": reward}},
    "workflow": {"workflow_class": SimpleWorkflow, "workflow_args": {"reward_function": reward}},
}
tasks = [{"question": word, "log": sys.argv[2]} for word in ("fig", "kiwi")]
AgentTrainer(train_dataset=tasks, config=sys.argv[3:], **DOORS[sys.argv[1]]).train()
"""


def write_project(root: Path) -> Path:
    """Write a user's files: an agent and a module beside it, in a folder of the project, and a script."""
    (root / "agents").mkdir(parents=True)
    (root / "agents" / "agent.py").write_text(AGENT)
    (root / "agents" / "wording.py").write_text("def question_of(word):\n    return f'say {word}'\n")
    (root / "train.py").write_text(SCRIPT)
    (root / "games.py").write_text(GAME)
    return root


def settings(model_folder: Path, run_dir: Path, *more: str) -> list[str]:
    sizes = ["num_steps=2", "tasks_per_step=2", "rollout.group_size=4", "rollout.max_tokens=6", "eval.at_start=false"]
    return [f"model.path={model_folder}", "model.device=cpu", f"run_dir={run_dir}", "trackers=[jsonl]", *sizes, *more]


def tasks_of(tmp_path: Path, **more: Any) -> tuple[Path, Path]:
    """Write a file of tasks; return it, and the file in which their rollouts record their process and node."""
    data, log = tmp_path / "tasks.jsonl", tmp_path / "log"
    data.write_text("".join(json.dumps({"word": word, "log": str(log), **more}) + "\n" for word in ("fig", "kiwi")))
    return data, log


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def who(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def until(holds: Callable[[], Any]) -> Any:
    for _ in range(3000):
        if value := holds():
            return value
        time.sleep(0.1)
    raise AssertionError("it never came true")


def all_gone(pids: set[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
