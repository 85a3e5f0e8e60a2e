"""Overhead of a training step of 1,024 rollouts: the share that is neither generation nor update, and its parts.

    python benchmarks/step_share.py [--rollouts 1024] [--tokens 64] [--steps 3] [--model FOLDER] [--device cpu] [--json]

A policy of 3.7 million parameters is sampled from by the embedded engine and trained by GRPO, 16 rollouts of each
task, one answer of `--tokens` tokens each. Everything happens in one process, whose CPU seconds are counted.
Generation is the time of the engine's own thread, update the time of the optimizer's step. The rest is everything
else: agents, their clients and the gateway; prompts to tokens and answers to text; assembling the batch; publishing,
explaining and writing. The rows `in process` have agents in environments, the rows `over HTTP` the function of
docs/scaling.md, which creates a client for each rollout; the time inside that function, in the package `openai`, is a
separate row.

So small a policy makes generation and update artificially cheap. With `--model` a pretrained one is trained instead;
use it with `--tokens 16 --steps 1`, which takes about ten minutes of CPU for a model of 135 million parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from against_trl.model import build_model

from rllm.agents.chat_agent import ChatAgent
from rllm.backends.local.backend import LocalBackend
from rllm.environments.base.multi_turn_env import SingleTurnEnvironment
from rllm.tracking.base import Tracker
from rllm.trainer.agent_trainer import AgentTrainer

KINDS = ("in process", "over HTTP")
GROUP_SIZE = 16
SKIPPED = 1
"""First steps to leave out, because they pay for set-up."""
TARGET = 0.05


class Marks(Tracker):
    """Tracker of the process's CPU seconds at each phase of a step; the backend notifies it when an update ends."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._in_clients = 0.0
        self._lock = threading.Lock()

    def mark(self, name: str) -> None:
        self._now[name] = time.process_time()
        self._now[f"{name}: engine"] = engine_time()

    def add_client(self, seconds: float) -> None:
        """Add the CPU time of an agent's thread inside its function."""
        with self._lock:
            self._in_clients += seconds

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "timing/step_s" in metrics:
            self.mark("reported")
            self.steps.append({**self._now, "clients": self._in_clients})
            self._now, self._in_clients = {}, 0.0

    def progress(self, phase: str, done: int, total: int) -> None:
        if phase == "roll out" and done in (0, total):
            self.mark("rolled out" if done else "begun")
        if phase == "update":
            self.mark("assembled")


def engine_time() -> float:
    """Return the CPU seconds of the engine's thread."""
    [ident] = [thread.ident for thread in threading.enumerate() if thread.name == "rllm-decode"]
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


MARKS = Marks()


class Marked(LocalBackend):
    """Local backend that marks the end of each update."""

    def publish(self) -> int:
        MARKS.mark("updated")
        return super().publish()


def reward(task: Mapping[str, Any], answer: str) -> float:
    return float(sum(map(ord, answer)) % 2)


class Speaker(ChatAgent):
    """Agent that answers with the policy."""

    def response_to_action(self, response: str) -> str:
        return response


def rollout_source(kind: str) -> dict[str, Any]:
    if kind == "in process":
        return {"agent_class": Speaker, "env_class": SingleTurnEnvironment, "env_args": {"reward_fn": reward}}
    from openai import OpenAI

    def ask(question: str, base_url: str) -> float:
        started = time.thread_time()
        client = OpenAI(base_url=base_url, api_key="none")
        answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        MARKS.add_client(time.thread_time() - started)
        return reward({}, answer.choices[0].message.content or "")

    return {"agent_run_func": ask}


def train(folder: Path, model: str, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the median CPU seconds of a step by kind of work."""
    num_tasks = options.rollouts // GROUP_SIZE
    AgentTrainer(
        train_dataset=[{"question": question} for question in questions(num_tasks)],
        config={
            "backend": f"{__name__}:Marked",
            "model": {"path": model, "device": options.device},
            "run_dir": str(folder),
            "num_steps": SKIPPED + options.steps,
            "tasks_per_step": num_tasks,
            "save_every": 0,
            "trackers": ["jsonl"],
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_tokens": options.tokens,
                "max_concurrent": options.rollouts,
                "timeout_s": 3600,
            },
        },
        trackers=[MARKS],
        **rollout_source(kind),
    ).train()
    return shares(MARKS.steps)


def questions(number: int) -> list[str]:
    return [f"reverse {each}" for each in range(number)]


def shares(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the steps after the first ones, and the share that is neither generation nor update."""
    rows = []
    for before, step in zip(steps[SKIPPED - 1 :], steps[SKIPPED:], strict=False):
        generation = step["rolled out: engine"] - step["begun: engine"]
        row = {
            "generation": generation,
            "update": step["updated"] - step["assembled"],
            "agents' clients": step["clients"],
            "runner and gateway": step["rolled out"] - step["begun"] - generation - step["clients"],
            "assemble": step["assembled"] - step["rolled out"],
            "publish and explain": step["reported"] - step["updated"],
            "between steps": step["begun"] - before["reported"],
        }
        whole = step["reported"] - before["reported"]
        rows.append({"step": whole, **row, "share": 1.0 - (row["generation"] + row["update"]) / whole})
    return {name: median(row[name] for row in rows) for name in rows[0]}


def measured(model: str, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Run `train` in a separate process."""
    words = [
        f"--rollouts={options.rollouts}",
        f"--tokens={options.tokens}",
        f"--steps={options.steps}",
        f"--device={options.device}",
    ]
    done = subprocess.run(
        [sys.executable, __file__, "--only", kind, "--model", model, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    if done.returncode != 0:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(kind: str, row: dict[str, float], num_rollouts: int) -> None:
    print(f"{kind}: a step of {num_rollouts} rollouts takes {row['step']:.1f} s of CPU")
    for name, value in row.items():
        if name not in ("step", "share"):
            print(
                f"  {name:20} {value:8.3f} s {value / row['step']:7.2%} {1e3 * value / num_rollouts:8.2f} ms a rollout"
            )
    print(f"  neither generation nor update: {row['share']:.2%} (target: {TARGET:.0%} at most)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the part of a training step that is neither generation nor update."
    )
    parser.add_argument("--rollouts", type=int, default=1024, help="rollouts of a step")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens of an answer")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one, made here")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only:
            print(json.dumps(train(Path(folder), str(options.model), options.only, options)))
            return
        model = options.model or Path(folder, "model")
        if not options.model:
            build_model(model)
        rows = {kind: measured(str(model), kind, options) for kind in KINDS}
    if options.json:
        print(json.dumps(rows))
        return
    for kind, row in rows.items():
        show(kind, row, options.rollouts)


if __name__ == "__main__":
    main()
