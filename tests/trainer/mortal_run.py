"""A real training run of a very small policy that is killed at given points: a program, and its parts.

python mortal_run.py RUN_DIR POLICY NUM_STEPS DATA    reads lines with points, such as update:3, and dies at each

Each life is a fork of the program, which has imported everything by then, and continues where the previous one ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import urllib.request
import zlib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch
from rllm.backends.base import Role, StepResult
from rllm.backends.local.backend import LocalBackend
from rllm.demo import tasks
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.trainer.agent_trainer import AgentTrainer

QUESTIONS = [{"question": f"How many {item} are left?"} for item in ("figs", "limes", "plums", "kiwis", "pears")]


def policy(cache_dir: Path) -> Path:
    """Return a model trained on a few conversations of the demo's clerk."""
    speech = partial(tasks.conversations, tasks.CAREFUL, system="Answer.")
    recipe = TinyPolicyRecipe(
        hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, skill_steps=12, habit_steps=2, batch_size=8
    )
    return tiny_policy(
        lambda seed: speech(seed=seed), lambda seed: speech(seed=seed), recipe=recipe, cache_dir=cache_dir
    )


class Mortal(LocalBackend):
    """Backend that kills its process at the point that DIES_AT names, such as the end of the third update.

    Its updates also report a number to which each of the shared random generators contributes.
    """

    _done: ClassVar[Counter[str]] = Counter()

    def step(self, role: Role, part: Batch, algorithm: Algorithm, *, scale: float) -> StepResult:
        result = super().step(role, part, algorithm, scale=scale)
        result.sums["policy/luck"] = random.random() + np.random.random() + float(torch.rand(()))
        return result

    def publish(self) -> int:
        self._end("update")
        version = super().publish()
        self._end("publish")
        return version

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self._is_time("save"):
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:1000])
            die()
        self._done["save"] += 1

    def _end(self, moment: str) -> None:
        if self._is_time(moment):
            die()
        self._done[moment] += 1

    def _is_time(self, moment: str) -> bool:
        return os.environ.get("DIES_AT") == f"{moment}:{self._done[moment] + 1}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def agent(question: str, base_url: str) -> float:
    """Take two turns, whose answers decide the reward."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
    return float(zlib.crc32(json.dumps(messages).encode()) % 5)


def trainer_of(
    run_dir: Path,
    model: Path,
    num_steps: int,
    max_staleness: int = 0,
    data: Mapping[str, Any] | None = None,
    **options: Any,
) -> AgentTrainer:
    """Return a trainer on five tasks, three a step: the second and the fourth step include the end of an epoch."""
    config = {
        "model": {"path": str(model)},
        "backend": "mortal_run:Mortal",
        "run_dir": str(run_dir),
        "num_steps": num_steps,
        "tasks_per_step": 3,
        "save_every": 2,
        "eval": {"every": 2, "num_rollouts": 2},
        "rollout": {"group_size": 4, "max_staleness": max_staleness},
        "optim": {"lr": 1e-3, "num_minibatches": 2},
        "trackers": ["jsonl"],
        "data": dict(data or {}),
    }
    return AgentTrainer(
        agent_run_func=agent, train_dataset=QUESTIONS, val_dataset=QUESTIONS[:2], config=config, **options
    )


def live(run_dir: Path, model: Path, num_steps: int, data: Mapping[str, Any]) -> None:
    """Train, in this process."""
    trainer = trainer_of(run_dir, model, num_steps, data=data, resume=(run_dir / "config.yaml").exists())
    report(f"begins {os.getpid()}")
    trainer.train()


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dies_at in sys.stdin:
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            report(str(os.waitstatus_to_exitcode(status)))
        else:
            os.environ["DIES_AT"] = dies_at.strip()
            live(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
            break
