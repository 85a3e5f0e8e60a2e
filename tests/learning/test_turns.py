"""Learning over several turns: from progress within a walk, and from what the environment answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.agents.chat_agent import TextAgent
from rllm.environments.base.base_env import BaseEnv, unwrapped
from rllm.parser.chat_template import ChatTemplate
from rllm.testing.tiny_policy import new_model, tiny_policy, train_tokenizer
from rllm.tracking.about import evaluations_of
from rllm.trainer import AgentTrainer
from rllm.types import JSONObject, Message

from .named import RECIPE
from .runs import SEEDS

GOAL = 3


class Corridor(BaseEnv):
    """Environment of the places 0 to 3: `1` goes right, any other answer left; arriving at 3 in time earns 1."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.start, self.max_moves = int(task["start"]), int(task["max_moves"])

    def reset(self) -> tuple[str, JSONObject]:
        self.place, self.num_moves = self.start, 0
        return str(self.place), {}

    def step(self, action: Any) -> tuple[str, float, bool, JSONObject]:
        self.place, self.num_moves = _moved(self.place, unwrapped(action)), self.num_moves + 1
        arrived = self.place == GOAL
        return str(self.place), float(arrived), arrived or self.num_moves == self.max_moves, {}

    @staticmethod
    def from_dict(info: Mapping[str, Any]) -> Corridor:
        return Corridor(info)


def _moved(place: int, action: str) -> int:
    return min(place + 1, GOAL) if action == "1" else max(place - 1, 0)


def _walks(seed: int) -> Iterator[list[Message]]:
    """Yield walks that turn at random."""
    rng = random.Random(seed)
    while True:
        place = rng.randrange(GOAL)
        messages: list[Message] = []
        while place != GOAL and len(messages) < 40:
            action = rng.choice("01")
            messages += [{"role": "user", "content": str(place)}, {"role": "assistant", "content": action}]
            place = _moved(place, action)
        yield messages


CODES = dict(zip("abcdefgh", "31415926", strict=True))


class Quiz(BaseEnv):
    """Environment that asks for a letter's code, shows it, and asks again; `is_scored` rewards the first answer."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.letter, self.is_scored = str(task["letter"]), bool(task["is_scored"])

    def reset(self) -> tuple[str, JSONObject]:
        self.reward: float | None = None
        return self.letter, {}

    def step(self, action: Any) -> tuple[str, float, bool, JSONObject]:
        if self.reward is None:
            self.reward = float(self.is_scored and unwrapped(action) == CODES[self.letter])
            return CODES[self.letter], 0.0, False, {}
        return "", self.reward, True, {}

    @staticmethod
    def from_dict(info: Mapping[str, Any]) -> Quiz:
        return Quiz(info)


class Pupil(TextAgent):
    """Agent that gets the code as the answer that it should have given, and is asked again."""

    def observation_to_messages(self, observation: Any) -> list[Message]:
        messages = super().observation_to_messages(observation)
        if not self.trajectory.steps:
            return messages
        return [self.messages[0], {"role": "assistant", "content": observation}, self.messages[0]]


def guesser(folder: Path) -> Path:
    """Return the folder of a policy that knows how a quiz looks, with digits that have nothing to do with the letters.

    It learns to predict all tokens, as pretrained models do: the others know nothing of the text between their answers.
    """
    rng = random.Random(0)
    tokenizer = train_tokenizer([*CODES, "user assistant"], vocab_size=300)
    model, template = new_model(tokenizer, RECIPE), ChatTemplate(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def quiz() -> list[Message]:
        texts = [text for _ in range(3) for text in (rng.choice([*CODES]), str(rng.randrange(10)))]
        return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, texts, strict=True)]

    for _ in range(100):
        ids = torch.tensor([template.render(quiz(), add_generation_prompt=False) for _ in range(16)])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def train(env: type[BaseEnv], tasks: dict[str, list[JSONObject]], run_dir: Path, *settings: str) -> list[float]:
    """Return the held-out mean reward before and after training."""
    AgentTrainer(
        agent_class=Pupil if env is Quiz else TextAgent,
        env_class=env,
        train_dataset=tasks["train"],
        val_dataset=tasks["held out"],
        config=["save_every=0", "trackers=[jsonl]", "rollout.max_tokens=4", f"run_dir={run_dir}", *settings],
    ).train()
    return [metrics["eval/reward"] for metrics in evaluations_of(run_dir)]


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_step_groups_teach_where_all_walks_arrive(seed: int, tmp_path: Path) -> None:
    """All have time to arrive, and held-out ones none to turn back. GRPO, which compares whole walks, reaches 0.53."""
    policy = tiny_policy(_walks, _walks, recipe=replace(RECIPE, skill_steps=60, habit_steps=1, batch_size=16))
    tasks = {
        "train": [{"id": str(number), "start": number % GOAL, "max_moves": 60} for number in range(24)],
        "held out": [{"id": f"from {start}", "start": start, "max_moves": GOAL + 1 - start} for start in range(GOAL)],
    }
    settings = [f"model.path={policy}", f"seed={seed}", "algorithm.name=gigpo", "optim.lr=1e-3", "num_steps=10"]
    settings += ["tasks_per_step=4", "rollout.max_steps=60", "eval.every=10", "eval.num_rollouts=40"]
    first, last = train(Corridor, tasks, tmp_path, *settings)
    assert first < 0.5 < 0.8 < last


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_observations_teach_without_rewards(seed: int, tmp_path: Path) -> None:
    tasks = {
        part: [{"id": f"{part} {letter}", "letter": letter, "is_scored": part == "held out"} for letter in CODES]
        for part in ("train", "held out")
    }
    policy = guesser(tmp_path / "policy")
    settings = [f"model.path={policy}", f"seed={seed}", "algorithm.observation_coef=1", "optim.lr=3e-3", "num_steps=40"]
    settings += ["tasks_per_step=8", "rollout.group_size=2", "eval.every=40", "eval.num_rollouts=10"]
    first, last = train(Quiz, tasks, tmp_path / "run", *settings)
    assert first < 0.3 < 0.6 < last
