from __future__ import annotations

import logging
from typing import Any

import pytest

from rllm.trainer.metrics.signals import Watch, signals
from rllm.types import LOST_KEY, Episode, Trajectory

HEALTHY = {
    "batch/zero_variance": 0.5,
    "batch/num_groups": 8.0,
    "rollout/truncated": 0.25,
    "rollout/accuracy": 0.5,
    "policy/ratio": 1.0,
    "policy/entropy": 0.5,
    "policy/sampler_gap_mean": 1e-6,
}


def failed(kind: str) -> Episode:
    return Episode(info={"error": {"type": kind, "message": "", "traceback": ""}})


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"batch/zero_variance": 1.0}, "no_variance", "all 8 groups earned the same throughout"),
        (
            {"batch/num_sequences": 0.0, "dropped/too_few_siblings": 1.0, "dropped/error": 5.0},
            "all_dropped",
            "nothing of this step is trained on (5 x dropped/error, 1 x dropped/too_few_siblings): see",
        ),
        ({"rollout/truncated": 1.0}, "all_truncated", "raise rollout.max_tokens"),
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
def test_a_dead_signal_is_named_with_its_value(changes: dict[str, float], name: str, said: str) -> None:
    assert signals(HEALTHY, [Episode()]) == {}
    found = signals({**HEALTHY, **changes}, [Episode()])
    assert list(found) == [name]
    assert said in found[name]


def test_what_is_done_already_is_no_remedy() -> None:
    def told(**changes: float) -> str:
        gap = {"policy/sampler_gap_mean": 0.3, **{name.replace("__", "/"): value for name, value in changes.items()}}
        return signals({**HEALTHY, **gap}, [])["sampler_disagrees"].partition(": ")[2]

    other = "see whether the sampler changes its distribution or has old weights"
    assert told() == f"set algorithm.correction=truncate, or {other}"
    assert told(policy__correction=0.9) == other
    aged = told(policy__correction=0.9, tokens__staleness_max=2.0)
    assert aged == "lower optim.lr or rollout.max_staleness, since answers are up to 2 updates old"


def test_a_policy_that_has_learned_its_task_may_be_sure_of_itself() -> None:
    assert "entropy_collapse" not in signals({**HEALTHY, "policy/entropy": 0.001, "rollout/accuracy": 1.0}, [])


def test_where_nothing_was_trained_on_the_samples_tell_the_entropy() -> None:
    nothing = {name: value for name, value in HEALTHY.items() if not name.startswith("policy/")}
    collapsed = {**nothing, "batch/zero_variance": 1.0, "rollout/entropy": 0.001}
    assert list(signals(collapsed, [])) == ["no_variance", "entropy_collapse"]
    assert list(signals({**collapsed, "rollout/entropy": 0.5}, [])) == ["no_variance"]


def test_rewards_that_raise() -> None:
    assert list(signals(HEALTHY, [failed("RewardError"), failed("RewardError"), Episode()])) == ["rewards_raise"]
    assert signals(HEALTHY, [failed("AgentError"), failed("RewardError"), Episode()]) == {}


def test_a_role_that_nobody_scores_is_named() -> None:
    def rollout(**rewards: float | None) -> Episode:
        return Episode(trajectories=[Trajectory(name=name, reward=reward) for name, reward in rewards.items()])

    left_out = {**HEALTHY, "dropped/unscored": 2.0}
    told = signals(left_out, [rollout(solver=1.0, judge=None), rollout(solver=None, judge=None)])
    assert list(told) == ["unscored_role"]
    assert "no trajectory of 'judge' has a reward" in told["unscored_role"]
    assert signals(left_out, [rollout(solver=1.0, judge=None), rollout(solver=0.0, judge=0.5)]) == {}
    assert signals(HEALTHY, [rollout(solver=1.0, judge=None)]) == {}, "a role that is not to learn"
    lost = Episode(trajectories=[Trajectory(name="coach")], info=failed("AgentError").info)
    assert signals(left_out, [rollout(solver=1.0), lost]) == {}, "what a failed rollout had begun"


def test_what_is_not_known_is_not_wrong() -> None:
    assert signals({}, []) == {}


def test_a_sign_is_told_when_it_appears_and_not_while_it_lasts(caplog: Any) -> None:
    watch = Watch()
    bad = {**HEALTHY, "rollout/truncated": 1.0}
    with caplog.at_level(logging.WARNING):
        assert watch.look(1, bad, []) == {"signal/all_truncated": 1.0}
        watch.look(2, bad, [])
        assert watch.look(3, HEALTHY, []) == {}
        watch.look(4, bad, [])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "step 1, all_truncated",
        "step 4, all_truncated",
    ]


def test_tasks_are_not_blamed_for_what_the_prompt_lacks() -> None:
    episode = Episode(info={LOST_KEY: ["tools"]})
    hint = signals({**HEALTHY, "batch/zero_variance": 1.0}, [episode, Episode()])["no_variance"]
    assert "model.tool_prompt=hermes" in hint
    assert "use tasks" not in hint
