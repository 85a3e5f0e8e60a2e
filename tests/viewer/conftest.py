"""A real, small training run to view, and a client of the viewer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from rllm.demo import tasks
from rllm.sdk import trajectory
from rllm.testing.tiny_policy import TinyPolicyRecipe, tiny_policy
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types import Trajectory
from rllm.viewer.app import create_app
from rllm.viewer.runs import Run, Runs

SMALL = TinyPolicyRecipe(
    hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400, skill_steps=2, habit_steps=1, batch_size=2
)
Client = Callable[..., TestClient]


def ask(messages: list[dict[str, Any]]) -> str:
    with OpenAI() as client:  # reads OPENAI_BASE_URL, which is the gateway's during a rollout
        answer = client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


@trajectory(name="solver")
def solve(question: str, edits: bool) -> None:
    messages = [{"role": "user", "content": question}]
    answer = ask(messages)
    text = "something else" if edits else answer
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Are you sure?"}]
    ask(messages)


@trajectory(name="judge")
def judge(question: str) -> None:
    ask([{"role": "user", "content": f"Is {question} a question?"}])


def make_agent() -> Callable[..., list[Trajectory]]:
    """Return a solver and a judge: every fifth rollout fails, every third edits its history, and rewards alternate."""
    turns, lock = itertools.count(), threading.Lock()

    def agent(question: str) -> list[Trajectory]:
        with lock:
            turn = next(turns)
        solved = solve(question, turn % 3 == 0)
        if turn % 5 == 4:
            raise ValueError("the shelf fell down")
        judged = judge(question)
        solved.reward, judged.reward = float(turn % 2), 1.0
        solved.reward_parts = {"politeness": 0.25}
        judged.info["verdict"] = {"reasoning": "it counted <b>well</b>"}
        return [solved, judged]

    return agent


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, policies: Path) -> Path:
    """Two steps of two tasks, four rollouts each, with an evaluation before and after; the second update has two epochs."""
    folder = tmp_path_factory.mktemp("viewer")
    speech = partial(tasks.conversations, tasks.CAREFUL, system="Answer.")
    policy = tiny_policy(
        lambda seed: speech(seed=seed), lambda seed: speech(seed=seed), recipe=SMALL, cache_dir=policies
    )
    rows = [{"id": f"row/{name}", "question": f"How many {name}?"} for name in ("figs", "limes", "plums")]
    AgentTrainer(
        agent_run_func=make_agent(),
        train_dataset=rows,
        val_dataset=rows[:1],
        config={
            "run_dir": str(folder / "runs/real"),
            "num_steps": 2,
            "tasks_per_step": 2,
            "model": {"path": str(policy)},
            "rollout": {"group_size": 4, "max_tokens": 6, "max_concurrent": 2},
            "optim": {"num_epochs": 2, "lr": 1e-2},
            "trackers": ["jsonl"],
        },
    ).train()
    return folder / "runs/real"


@pytest.fixture
def run(run_folder: Path) -> Iterator[Run]:
    found = Runs([str(run_folder)])
    yield found.all()[0]
    found.close()


@pytest.fixture
def look(run_folder: Path) -> Iterator[Client]:
    """`look()` or `look(folder, token="...")`: a client of the viewer over a folder, by default the real run's."""
    opened: list[Runs] = []

    def make(*sources: Path | str, token: str | None = None, base_url: str = "http://127.0.0.1:7070") -> TestClient:
        opened.append(Runs([str(source) for source in sources or (run_folder,)]))
        return TestClient(create_app(opened[-1], token=token), base_url=base_url, follow_redirects=False)

    yield make
    for runs in opened:
        runs.close()
