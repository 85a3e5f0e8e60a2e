from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.rewards.llm_judge import RubricJudge, judge

Example = Callable[[str, str], ModuleType]
RUBRIC = Path(__file__).parents[2] / "examples" / "llm_judge" / "rubric.yaml"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("Good morning, Ann.", 1.0), ("Good morning, Ben.", 0.5), ("Good evening, Ann. Next!", 0.5), ("Next!", 0.0)],
)
def test_judge_scores_by_the_rubric(example: Example, reply: str, expected: float) -> None:
    rubric = judge(RUBRIC)
    assert isinstance(rubric, RubricJudge)
    with example("llm_judge", "offline").judge_server() as server:
        scored = judge({**rubric.rubric.model_dump(), "base_url": server.base_url})({"guest": "Ann, morning"}, reply)
    assert scored.reward == expected


def test_held_out_guests_are_not_trained_on(example: Example) -> None:
    train, held_out = example("llm_judge", "offline").tasks(seed=1)
    assert (len(train), len(held_out)) == (24, 12)
    assert not [task for task in held_out if task in train]


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0])
def test_training_reaches_the_reward_in_the_readme(train: Callable[..., list[dict[str, Any]]], seed: int) -> None:
    first, *_, last = train("llm_judge", f"seed={seed}")
    assert first["eval/reward"] <= 0.75
    assert last["eval/reward"] >= 0.9
