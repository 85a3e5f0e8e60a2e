from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from rllm.trainer.run_health import RunHealth, signals
from rllm.types import LOST_KEY, Episode, Trajectory

HEALTHY = {
    "batch/zero_variance": 0.5,
    "batch/num_groups": 8.0,
    "rollout/truncated": 0.15,
    "rollout/accuracy": 0.5,
    "policy/ratio": 1.0,
    "policy/entropy": 0.5,
    "policy/sampler_gap_mean": 1e-6,
}


def failed(kind: str) -> Episode:
    return Episode(info={"error": {"type": kind, "message": "", "traceback": ""}})


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"batch/zero_variance": 1.0}, "no_variance", "all 8 groups gave the same reward"),
        (
            {"batch/num_sequences": 0.0, "dropped/too_few_siblings": 1.0, "dropped/error": 5.0},
            "all_dropped",
            "nothing of this step is trained on (5 x dropped/error, 1 x dropped/too_few_siblings)",
        ),
        ({"rollout/truncated": 1.0}, "all_truncated", "raise rollout.max_tokens"),
        ({"rollout/truncated": 0.2}, "many_truncated", "20% of the answers were cut off"),
        ({"policy/ratio": 7.0}, "ratio_overflow", "ratio is 7, and the updates"),
        ({"policy/update_kl": 3.0}, "ratio_overflow", "moved the policy by 3 nats a token: lower optim.lr"),
        ({"policy/entropy": 0.001, "batch/zero_variance": 0.9}, "entropy_collapse", "entropy is 0.001 nats"),
        (
            {"policy/entropy": 0.001, "rollout/reward_p10": 0.0, "rollout/reward_p90": 0.0},
            "entropy_collapse",
            "rewards hardly differ",
        ),
        ({"policy/sampler_gap_mean": 0.3}, "sampler_disagrees", "differ by 0.3 nats a token"),
    ],
)
def test_warning_without_learning_signal_has_its_value(changes: dict[str, float], name: str, expected: str) -> None:
    assert signals(HEALTHY, [Episode()]) == {}
    found = signals({**HEALTHY, **changes}, [Episode()])
    assert list(found) == [name]
    assert expected in found[name]


def test_remedy_that_is_already_applied_is_not_suggested() -> None:
    def outcome_of(**changes: float) -> str:
        gap = {"policy/sampler_gap_mean": 0.3, **{name.replace("__", "/"): value for name, value in changes.items()}}
        return signals({**HEALTHY, **gap}, [])["sampler_disagrees"].partition(": ")[2]

    other = "see whether the sampler changes its distribution or has old weights"
    assert outcome_of() == f"set algorithm.correction=truncate, or {other}"
    assert outcome_of(policy__correction=0.9) == other
    aged = outcome_of(policy__correction=0.9, tokens__staleness_max=2.0)
    assert aged == "lower optim.lr, rollout.max_staleness or data.replay_steps, since answers are up to 2 updates old"


def test_low_entropy_is_healthy_once_the_task_is_solved() -> None:
    assert "entropy_collapse" not in signals({**HEALTHY, "policy/entropy": 0.001, "rollout/accuracy": 1.0}, [])


def test_entropy_of_samples_is_used_if_nothing_was_trained() -> None:
    nothing = {name: value for name, value in HEALTHY.items() if not name.startswith("policy/")}
    collapsed = {**nothing, "batch/zero_variance": 1.0, "rollout/entropy": 0.001}
    assert list(signals(collapsed, [])) == ["no_variance", "entropy_collapse"]
    assert list(signals({**collapsed, "rollout/entropy": 0.5}, [])) == ["no_variance"]


def test_failing_rewards_are_reported() -> None:
    assert list(signals(HEALTHY, [failed("RewardError"), failed("RewardError"), Episode()])) == ["rewards_raise"]
    assert signals(HEALTHY, [failed("AgentError"), failed("RewardError"), Episode()]) == {}


def test_role_without_rewards_is_reported() -> None:
    def rollout(**rewards: float | None) -> Episode:
        return Episode(trajectories=[Trajectory(name=name, reward=reward) for name, reward in rewards.items()])

    left_out = {**HEALTHY, "dropped/unscored": 2.0}
    found = signals(left_out, [rollout(solver=1.0, judge=None), rollout(solver=None, judge=None)])
    assert list(found) == ["unscored_role"]
    assert "no trajectory named 'judge' has a reward" in found["unscored_role"]
    assert signals(left_out, [rollout(solver=1.0, judge=None), rollout(solver=0.0, judge=0.5)]) == {}
    assert signals(HEALTHY, [rollout(solver=1.0, judge=None)]) == {}, "the role is not trained"
    lost = Episode(trajectories=[Trajectory(name="coach")], info=failed("AgentError").info)
    assert signals(left_out, [rollout(solver=1.0), lost]) == {}, "the rollout failed before its reward"


def test_missing_metrics_give_no_warnings() -> None:
    assert signals({}, []) == {}


def collapse_at(entropies: Sequence[float], rewards: Sequence[float], **others: float) -> int | None:
    """Return the first step of a run with a warning about its entropy, counted from 1."""
    watch = RunHealth()
    for step, (entropy, reward) in enumerate(zip(entropies, rewards, strict=True), start=1):
        metrics = {**HEALTHY, "policy/entropy": entropy, "rollout/reward": reward, "rollout/accuracy": reward, **others}
        if "signal/entropy_collapse" in watch.check(step, metrics, []):
            return step
    return None


def line(start: float, end: float, steps: int) -> list[float]:
    return [start + (end - start) * step / (steps - 1) for step in range(steps)]


def decay(start: float, end: float, steps: int) -> list[float]:
    return [start * (end / start) ** (step / (steps - 1)) for step in range(steps)]


NOISE = [1.6, 0.5, 1.1, 0.7, 1.4, 0.9, 0.55, 1.2, 0.8, 1.5] * 3
DEMO = [0.394, 0.055, 0.073, 0.038, 0.047, 0.024, 0.048, 0.038, 0.046, 0.04]
DEMO_REWARDS = [0.234, 0.859, 0.922, 0.984, 0.953, 0.969, 0.984, 0.969, 0.922, 0.969]
HASTY = [0.394, 0.051, 0.047, 0.049, 0.052, 0.02, 0.064, 0.036, 0.079, 0.025, 0.039]
HASTY_REWARDS = [0.234, 0.688, 0.953, 0.828, 0.938, 0.969, 0.953, 0.938, 0.844, 0.828, 0.906]
"""Two runs of the demo, with its own learning rate and with four times that."""


@pytest.mark.parametrize(
    ("entropies", "rewards", "at"),
    [
        pytest.param(line(2.7, 0.19, 11), [0.3] * 11, 11, id="a fast collapse, evenly"),
        pytest.param(decay(2.7, 0.19, 11), [0.3] * 11, 10, id="a fast collapse, by the same factor in each step"),
        pytest.param([2.7, 2.6, 2.5, 0.1, 0.1, 0.1], [0.3] * 6, 5, id="a fast collapse, in one step"),
        pytest.param(decay(2.7, 0.19, 11), line(0.1, 0.7, 11), 10, id="a fast collapse, while the reward rises"),
        pytest.param(decay(2.7, 0.05, 200), [0.3] * 200, 118, id="a slow collapse"),
        pytest.param(decay(2.7, 0.05, 200), line(0.1, 0.8, 200), None, id="a slow fall while the reward rises"),
        pytest.param(decay(0.4, 0.03, 20), [0.3] * 20, 20, id="a collapse of a policy that starts low"),
        pytest.param(decay(0.4, 0.03, 20), line(0.1, 0.8, 20), None, id="a policy that starts low and learns"),
        pytest.param(decay(2.7, 0.05, 11), [*line(0.3, 0.9, 5), *[1.0] * 6], None, id="a task that is soon solved"),
        pytest.param([0.05] * 30, [0.3] * 30, None, id="a policy that is low and stays there"),
        pytest.param(NOISE, [0.3] * 30, None, id="noise"),
        pytest.param([*[2.0] * 5, 0.1, *[2.0] * 5], [0.3] * 11, None, id="a single step of other tasks"),
        pytest.param([*[0.6] * 5, 9.0, *[0.6] * 5], [0.3] * 11, None, id="a single outlier"),
        pytest.param(DEMO, DEMO_REWARDS, None, id="the demo"),
        pytest.param(HASTY, HASTY_REWARDS, None, id="the demo at four times its rate"),
    ],
)
def test_entropy_collapse_is_detected(entropies: list[float], rewards: list[float], at: int | None) -> None:
    assert collapse_at(entropies, rewards) == at


def test_intended_entropy_decrease_gives_no_warning() -> None:
    falling = decay(2.7, 0.19, 11)
    assert collapse_at(falling, [0.3] * 11, **{"policy/teacher_kl": 0.1}) is None
    watch = RunHealth()
    shown = [watch.check(step, {"policy/entropy": value}, []) for step, value in enumerate(falling)]
    assert not any(shown), "metrics of demonstrations"


def test_solved_steps_are_reported_only_if_they_persist() -> None:
    solved = {**HEALTHY, "batch/zero_variance": 1.0, "rollout/accuracy": 1.0}
    watch = RunHealth()
    found = [list(watch.check(step, metrics, [])) for step, metrics in enumerate([HEALTHY, *[solved] * 3, HEALTHY])]
    assert found == [[], [], [], ["signal/no_variance"], []]
    assert list(signals({**solved, "rollout/accuracy": 0.0}, [], [HEALTHY])) == ["no_variance"]
    assert list(signals(solved, [])) == ["no_variance"], "the tasks were too easy from the start"


def test_intermittent_warning_is_logged_once(caplog: Any) -> None:
    watch = RunHealth()
    bad = {**HEALTHY, "rollout/truncated": 1.0}
    with caplog.at_level(logging.WARNING):
        assert watch.check(1, bad, []) == {"signal/all_truncated": 1.0}
        watch.check(2, bad, [])
        assert watch.check(3, HEALTHY, []) == {}
        assert watch.check(4, bad, []) == {"signal/all_truncated": 1.0}
        watch.check(15, bad, [])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "step 1, all_truncated",
        "step 15, all_truncated",
    ]


def test_resumed_run_keeps_its_warnings(caplog: Any) -> None:
    steps = [{**HEALTHY, "policy/entropy": value} for value in [2.7, 2.6, 2.5, 0.1, 0.1, 0.1]]
    whole, first = RunHealth(), RunHealth()
    uninterrupted = [whole.check(step, metrics, []) for step, metrics in enumerate(steps)]
    assert [bool(found) for found in uninterrupted] == [False] * 4 + [True] * 2
    for step in range(5):
        first.check(step, steps[step], [])
    caplog.clear()
    resumed = RunHealth(json.loads(json.dumps(first.state)))
    assert resumed.check(5, steps[5], []) == uninterrupted[5]
    assert not caplog.records, "logged before the resume"


def test_tasks_are_not_blamed_for_content_missing_from_the_prompt() -> None:
    episode = Episode(info={LOST_KEY: ["tools"]})
    hint = signals({**HEALTHY, "batch/zero_variance": 1.0}, [episode, Episode()])["no_variance"]
    assert "model.tool_prompt=hermes" in hint
    assert "use tasks" not in hint
