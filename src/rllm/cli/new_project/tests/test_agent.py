"""The agent and its reward without a model: a script answers in its place."""

import json
from pathlib import Path

import pytest
from agent import agent, reward

from rllm.rewards.scoring import with_reward
from rllm.testing import scripted_gateway

ROOT = Path(__file__).parents[1]
TASKS = [
    json.loads(line)
    for file in ("tasks.jsonl", "held_out.jsonl")
    for line in (ROOT / file).read_text().split("\n")
    if line
]


@pytest.mark.parametrize(
    ("text", "earned"),
    [("2 + 3 is 5.\nAnswer: 5", 1.0), ("Answer: 4\nAnswer: 5", 1.0), ("Answer: 6", 0.1), ("It is 5.", 0.0)],
)
def test_reward_of_answers(text: str, earned: float) -> None:
    assert reward({"answer": "5"}, text) == earned


def test_rollout_as_in_training() -> None:
    with scripted_gateway(["2 + 3 is 5.\nAnswer: 5"]) as gateway:
        episode = gateway.rollout(with_reward(agent, reward), {"question": "What is 2 + 3?", "answer": "5"})
    [trajectory] = episode.trajectories
    assert trajectory.reward == 1.0
    assert episode.is_correct
    assert [len(step.logprobs) == len(step.response_ids) > 0 for step in trajectory.steps] == [True]


def test_every_task_can_be_solved() -> None:
    for task in TASKS:
        assert reward(task, f"Answer: {task['answer']}") == 1.0
