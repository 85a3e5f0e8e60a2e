"""Metrics of rollouts, by whether rewards are needed."""

from __future__ import annotations

from rllm.trainer.metrics import EpisodeMetrics
from rllm.types import Episode, Trajectory

SCORED = Episode(task_id="a", is_correct=True, trajectories=[Trajectory(reward=1.0)])
UNSCORED = Episode(task_id="a", index=1, trajectories=[Trajectory()])
FAILED = Episode(task_id="a", info={"error": {"type": "AgentError", "message": "no"}})


def test_unscored_episode_is_usable_without_rewards_unless_it_failed() -> None:
    needing, not_needing = EpisodeMetrics(), EpisodeMetrics(needs_rewards=False)
    assert [judge.why_unusable(SCORED) for judge in (needing, not_needing)] == [None, None]
    assert "not scored" in (needing.why_unusable(UNSCORED) or "")
    assert not_needing.why_unusable(UNSCORED) is None
    assert needing.why_unusable(FAILED) == not_needing.why_unusable(FAILED) == "AgentError: no"


def test_unscored_episodes_do_not_lower_the_accuracy() -> None:
    judge = EpisodeMetrics(needs_rewards=False)
    for name, found in (
        ("accuracy", judge.of_training([SCORED, UNSCORED, FAILED])["rollout/accuracy"]),
        ("held out", judge.of_evaluation([SCORED, UNSCORED, FAILED])["eval/accuracy"]),
    ):
        assert found == 0.5, name
    verdicts = {"rollout/accuracy", "eval/accuracy", "val/pass@1", "batch/solve_none"}
    reported = judge.of_evaluation([UNSCORED]) | judge.of_training([UNSCORED])
    assert not verdicts & reported.keys()
    assert (reported["eval/num_episodes"], reported["rollout/num_unscored"]) == (1.0, 1.0)
    assert verdicts <= (EpisodeMetrics().of_evaluation([SCORED]) | EpisodeMetrics().of_training([SCORED])).keys()
