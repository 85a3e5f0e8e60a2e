"""Whole runs on two workers: each of the three rollout sources with another algorithm, and the reward rises."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rllm.agents.chat_agent import ChatAgent
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.trainer import AgentTrainer
from rllm.workflows.simple_workflow import SimpleWorkflow

sys.path.append(str(Path(__file__).parents[1]))
from learning.alphabet import policy, reward, tasks

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

SETTINGS = [
    "backend=verl",
    "model.device=cpu",
    "verl.workers_per_node=2",
    "verl.timeout_s=1800",
    "tasks_per_step=8",
    "rollout.group_size=8",
    "rollout.max_tokens=12",
    "optim.lr=5e-4",
    "optim.num_minibatches=2",
    "eval.num_rollouts=4",
    "trackers=[jsonl]",
]


def train(run_dir: Path, settings: Sequence[str], *, resume: bool = False, **door: Any) -> list[dict[str, Any]]:
    """Train, and return every line of the run's metrics."""
    train_tasks, held_out = tasks(0)
    AgentTrainer(
        train_dataset=train_tasks,
        val_dataset=held_out,
        config=[f"model.path={policy()}", f"run_dir={run_dir}", *SETTINGS, *settings],
        resume=resume,
        **door,
    ).train()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def rewards(lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the rewards on held-out tasks, of the untrained and of the trained policy."""
    judged = [line["eval/reward"] for line in lines if "eval/reward" in line]
    return judged[0], judged[-1]


def learnt(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the metrics about learning, by step."""
    of_learning = ("rollout/", "policy/", "critic/", "optim/", "tokens/")
    return {
        line["step"]: {
            name: value for name, value in line.items() if name.startswith(of_learning) and "per_second" not in name
        }
        for line in lines
        if "policy/loss" in line
    }


WORKFLOW = {"workflow_class": SimpleWorkflow, "workflow_args": {"reward_function": reward}}


def test_workflow_learns_by_grpo_and_a_killed_run_resumes_exactly(cluster: None, tmp_path: Path) -> None:
    settings = ["algorithm.name=grpo", "algorithm.kl_coef=0.001", "num_steps=14", "save_every=10", "eval.every=0"]
    lines = train(tmp_path / "run", settings, **WORKFLOW)
    before, after = rewards(lines)
    assert after > before + 0.2
    assert max(line["policy/sampler_gap_max"] for line in lines if "policy/loss" in line) < 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000014")

    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step-000014")
    again = train(tmp_path / "killed", settings, resume=True, **WORKFLOW)
    assert learnt(again) == learnt(lines)


def answering(question: str, answer: str, base_url: str) -> float:
    """Answer as an agent of any author: with any client, through the gateway."""
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": question}]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        text = json.load(response)["choices"][0]["message"]["content"]
    return reward({"question": question, "answer": answer}, text)


def test_agent_function_learns_by_remax(cluster: None, tmp_path: Path) -> None:
    before, after = rewards(
        train(tmp_path / "run", ["algorithm.name=remax", "num_steps=24", "eval.every=0"], agent_run_func=answering)
    )
    assert after > before + 0.15


class Speaker(ChatAgent):
    """Agent that answers the question."""

    def response_to_action(self, response: str) -> str:
        return response


def test_agent_in_an_environment_learns_by_ppo_on_its_own_cluster(tmp_path: Path) -> None:
    settings = ["algorithm.name=ppo", "critic.lr=1e-3", "critic.warmup_steps=2", "num_steps=20", "eval.every=0"]
    environment = {"env_class": SingleTurnEnvironment, "env_args": {"reward_fn": reward}}
    lines = train(tmp_path / "run", settings, agent_class=Speaker, **environment)
    before, after = rewards(lines)
    assert after > before + 0.2
    assert any(line.get("critic/explained_variance", 0.0) > 0.05 for line in lines)
