import threading
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.rewards.reward_types import RewardOutput
from rllm.rewards.scoring import group_reward
from rllm.trainer.rescore import Rescored, compare, rescore, with_rewards, write_rewards
from rllm.types import Episode, Step, Trajectory


def episode(index: int, *answers: str, reward: float | None = 1.0) -> Episode:
    paths = [Trajectory(reward=reward, steps=[Step(model_response=answer)]) for answer in answers]
    return Episode(task_id="figs", index=index, session_id=f"s{index}", task={"answer": "7"}, trajectories=paths)


def is_right(task: dict[str, str], answer: str) -> float | None:
    if answer == "?":
        return None
    return float(int(answer) == int(task["answer"]))


def test_each_trajectory_is_scored_by_its_last_answer_in_order() -> None:
    found = list(rescore([episode(0, "7", "8"), episode(1, "?"), episode(2, "seven", reward=None)], is_right))
    assert [(item.session_id, item.trajectory, item.before, item.after) for item in found] == [
        ("s0", 0, 1.0, 1.0),
        ("s0", 1, 1.0, 0.0),
        ("s1", 0, 1.0, None),
        ("s2", 0, None, None),
    ]
    assert found[3].error is not None
    assert "invalid literal for int" in found[3].error
    assert [item.has_changed for item in found] == [False, True, True, False]


def test_hanging_reward_is_abandoned_after_its_timeout() -> None:
    end = threading.Event()

    def hangs(task: dict[str, str], answer: str) -> float:
        return float(end.wait(60))

    found = list(rescore([episode(0, "7"), episode(1, "8")], hangs, max_concurrent=1, timeout_s=0.01))
    end.set()
    late = "reward function test_hanging_reward_is_abandoned_after_its_timeout.<locals>.hangs did not finish within"
    late += " 0.01 s: raise reward.timeout_s if it was merely slow"
    assert [(item.after, item.error) for item in found] == [(None, late)] * 2


def test_group_reward_compares_the_rollouts_of_a_task() -> None:
    @group_reward
    def highest(task: dict[str, str], answers: list[str]) -> list[float]:
        return [float(answer == max(answers)) for answer in answers]

    of_others = episode(0, "9")
    of_others.info["training_step"] = 4
    found = list(rescore([episode(0, "7"), of_others, episode(1, "8")], highest))
    assert [(item.answer, item.after) for item in found] == [("7", 0.0), ("8", 1.0), ("9", 1.0)]


def test_untrainable_trajectory_keeps_its_reward() -> None:
    played, evaluated = episode(0, "7", "8"), episode(1, "7", "8")
    played.info["split"], evaluated.info["split"] = "train", "eval"
    for path in (played.trajectories[1], *evaluated.trajectories):
        path.trainable = False
    found = list(rescore([played, evaluated], is_right))
    assert [(item.session_id, item.trajectory) for item in found] == [("s0", 0), ("s1", 0), ("s1", 1)]


def test_changes_by_new_rewards_are_reported() -> None:
    def one(index: int, before: float | None, after: float | None) -> Rescored:
        return Rescored(
            episode_id=f"t:{index}", session_id="s", split="train", trajectory=0, name="agent",
            before=before, after=after, answer="",
        )  # fmt: skip

    found = compare([one(0, 1.0, 1.0), one(1, 0.0, 0.5), one(2, 1.0, 0.0), one(3, None, 0.25)], num_largest=2)
    assert (found.num_trajectories, found.num_changed, found.num_failed) == (4, 3, 0)
    assert (found.mean_before, found.mean_after) == (pytest.approx(2 / 3), 1.75 / 4)
    assert [item.episode_id for item in found.largest] == ["t:2", "t:1"]


def test_new_rewards_are_written_next_to_the_old_ones(tmp_path: Path) -> None:
    first = write_rewards(tmp_path, "is_right", rescore([episode(0, "8", "7")], is_right))
    second = write_rewards(tmp_path, "is_right", [])
    assert (first.name, second.name) == ("is_right.jsonl", "is_right-2.jsonl")
    [changed] = with_rewards([episode(0, "8", "7")], first)
    assert [path.final_reward() for path in changed.trajectories] == [0.0, 1.0]
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="is not a file of `rllm rescore`"):
        list(with_rewards([], tmp_path / "other.jsonl"))


def test_correctness_is_recomputed(tmp_path: Path) -> None:
    def judge(task: dict[str, str], answer: str) -> RewardOutput:
        return RewardOutput(is_right(task, answer), is_correct=True if answer == "9" else None)

    def given() -> list[Episode]:
        made = [
            episode(number, *answers) for number, answers in enumerate([("7",), ("8",), ("9",), ("7", "?"), ("?",)])
        ]
        for number, one in enumerate(made):
            one.is_correct = number > 0
        failed = Episode(task_id="figs", index=5, session_id="s5", is_correct=True, info={"error": {}})
        return [*made, failed]

    path = write_rewards(tmp_path, "judge", rescore(given()[:-1], judge))
    assert [one.is_correct for one in with_rewards(given(), path)] == [True, False, True, True, False, True]


def test_episode_of_an_unknown_task_is_reported() -> None:
    lost = episode(0, "7")
    lost.task = None
    with pytest.raises(ConfigError, match="episode 'figs:0' has no task"):
        list(rescore([lost], is_right))
