from __future__ import annotations

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.config.schema import RoleConfig
from rllm.trainer.credit import assemble
from rllm.trainer.metrics import (
    batch_metrics,
    episode_metrics,
    eval_metrics,
    failure_report,
    memory_metrics,
    rates,
    staleness,
    why_unusable,
)
from rllm.types import Episode, Step, TerminationReason, Trajectory


def episode(
    reward: float | None = None, *, correct: bool = False, num_tokens: int = 2, metrics: dict[str, float] | None = None
) -> Episode:
    step = Step(
        prompt_ids=[1],
        response_ids=[5] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        finish_reason="length" if num_tokens > 3 else "stop",
    )
    return Episode(
        task_id="t", trajectories=[Trajectory(reward=reward, steps=[step])], is_correct=correct, metrics=metrics or {}
    )


FAILED = Episode(
    task_id="t", info={"error": {"type": "AgentError", "message": "f raised ValueError: 3", "traceback": ""}}
)


def test_accuracy_counts_failed_rollouts_but_not_unscored_ones() -> None:
    metrics = episode_metrics([episode(1.0, correct=True), episode(0.5, num_tokens=4), FAILED, episode(None)])
    assert metrics == {
        "rollout/reward": 0.75,
        "rollout/reward_p10": pytest.approx(0.55),
        "rollout/reward_p90": pytest.approx(0.95),
        "rollout/accuracy": pytest.approx(1 / 3),
        "rollout/response_tokens": pytest.approx(8 / 3),
        "rollout/entropy": 1.0,
        "rollout/calls_per_episode": 0.75,
        "rollout/truncated": pytest.approx(1 / 3),
        "rollout/num_failed": 1.0,
        "rollout/num_unscored": 1.0,
    }


def test_single_rollout_has_metrics() -> None:
    metrics = episode_metrics([episode(1.0, num_tokens=4)])
    assert (metrics["rollout/calls_per_episode"], metrics["rollout/truncated"]) == (1.0, 1.0)


def test_mean_of_nothing_is_omitted() -> None:
    assert "rollout/reward" not in episode_metrics([FAILED])
    assert "eval/reward" not in eval_metrics([FAILED])


def test_agent_metrics_cannot_replace_measured_ones() -> None:
    agents = [{"reward": 9.0, "tool/calls": 2.0, "rollout/accuracy": 8.0}, {"tool/calls": 4.0}]
    metrics = episode_metrics([episode(1.0, metrics=agents[0]), episode(0.0, metrics=agents[1])])
    assert metrics["rollout/reward"] == 0.5
    assert metrics["rollout/accuracy"] == 0.0
    assert metrics["agent/reward"] == 9.0
    assert metrics["tool/calls"] == 3.0
    judged = eval_metrics([episode(1.0, metrics=agents[0]), episode(0.0, metrics=agents[1])])
    assert (judged["eval/agent/reward"], judged["eval/tool/calls"]) == (9.0, 3.0)


def test_several_roles_have_separate_metrics() -> None:
    two = Episode(trajectories=[Trajectory(name="solver", reward=1.0), Trajectory(name="judge", reward=0.25)])
    unjudged = Episode(trajectories=[Trajectory(name="solver", reward=1.0), Trajectory(name="judge")])
    metrics = episode_metrics([two, two, unjudged, FAILED])
    assert (metrics["rollout/reward/solver"], metrics["rollout/reward/judge"]) == (1.0, 0.25)
    better = Episode(trajectories=[Trajectory(name="solver", reward=2.0), Trajectory(name="judge", reward=0.25)])
    spread = episode_metrics([two, better])
    assert spread["rollout/reward/solver_p10"] == pytest.approx(1.1)
    assert spread["rollout/reward/solver_p90"] == pytest.approx(1.9)
    assert eval_metrics([two, two, FAILED])["eval/reward/judge"] == 0.25
    assert not any(name.startswith("rollout/reward/") for name in episode_metrics([episode(1.0)]))


def test_partial_trajectory_of_a_failed_rollout_is_not_unscored() -> None:
    partial = Episode(trajectories=[Trajectory(steps=[])], info=FAILED.info)
    assert episode_metrics([partial, episode(1.0)])["rollout/num_unscored"] == 0.0


def test_termination_reasons_are_counted() -> None:
    done, cut = episode(1.0), episode(0.0)
    done.termination_reason, cut.termination_reason = TerminationReason.ENV_DONE, TerminationReason.MAX_TURNS_EXCEEDED
    metrics = episode_metrics([done, done, cut, episode(1.0)])
    assert (metrics["rollout/ended_by/env_done"], metrics["rollout/ended_by/max_turns_exceeded"]) == (0.5, 0.25)


def test_staleness_counts_publishes_since_sampling() -> None:
    def ages_of(*episodes: Episode) -> dict[str, float]:
        roles = {"frozen": RoleConfig(trainable=False)}
        return staleness(episodes, assemble(episodes, GRPO(), step=0, temperature=1.0, roles=roles).credits, 3)

    aged = [episode(1.0), episode(0.0), episode(0.0), episode(None), episode(1.0)]
    for item, version in zip(aged, (3, 1, None, 0, 0), strict=True):
        item.trajectories[0].steps[0].weight_version = version
    aged[-1].trajectories[0].name = "frozen"
    assert ages_of(*aged) == {"tokens/staleness": 1.0, "tokens/staleness_max": 2.0}
    assert ages_of(episode(1.0), episode(0.0)) == {}


def test_evaluation_has_its_metrics() -> None:
    assert eval_metrics([episode(1.0, correct=True), episode(0.0), FAILED, FAILED, episode(None)]) == {
        "eval/accuracy": 0.25,
        "eval/reward": 0.5,
        "eval/truncated": 0.0,
        "eval/num_episodes": 5.0,
        "eval/num_failed": 2.0,
        "eval/num_unscored": 1.0,
    }


def test_batch_has_its_metrics() -> None:
    alike = [
        Episode(task_id="b", trajectories=[Trajectory(reward=1.0, steps=item.trajectories[0].steps)])
        for item in (episode(1.0), episode(1.0))
    ]
    assembled = assemble([episode(1.0), episode(0.0), FAILED, *alike], GRPO(), step=0, temperature=1.0)
    assert batch_metrics(assembled) == {
        "batch/num_sequences": 2.0,
        "batch/num_groups": 2.0,
        "batch/zero_variance": 0.5,
        "batch/advantage": pytest.approx(0.0, abs=1e-9),
        "batch/advantage_p10": pytest.approx(-0.7, abs=1e-4),  # of 1, 0, 0 and -1
        "batch/advantage_p90": pytest.approx(0.7, abs=1e-4),
        "tokens/drift": 0.0,
        "dropped/error": 1.0,
        "dropped/zero_variance": 2.0,
    }


def test_rates_follow_from_times_and_tokens() -> None:
    assert rates({"rollout": 3.0, "update": 1.0}, [episode(num_tokens=4), episode(num_tokens=8)], 6.0) == {
        "timing/rollout_s": 3.0,
        "timing/update_s": 1.0,
        "timing/step_s": 4.0,
        "tokens/sampled": 12.0,
        "tokens/per_second": 3.0,
        "tokens/per_second_rollout": 4.0,
        "tokens/per_second_update": 6.0,
    }


def test_rates_of_early_rollouts_are_omitted() -> None:
    found = rates({"rollout": 0.001, "update": 3.999}, [episode(num_tokens=12)], ahead=True)
    assert found["tokens/per_second"] == 3.0
    assert "tokens/per_second_rollout" not in found


def test_memory_is_in_gigabytes() -> None:
    found = memory_metrics({"weights": 500_000_000})
    assert found["memory/weights_gb"] == 0.5
    assert 0.05 < found["memory/peak_gb"] < 1000, "torch alone takes a tenth of one"


def test_unscored_rollout_is_unusable_with_a_reason() -> None:
    assert why_unusable(episode(0.0)) is None
    assert why_unusable(FAILED) == "AgentError: f raised ValueError: 3"
    assert why_unusable(Episode(trajectories=[Trajectory(reward=1.0)], info=FAILED.info)) == why_unusable(FAILED)
    assert why_unusable(episode(None)) == "not scored: it has no reward"
    silent = Episode(info={"unscored": "reward silent returned None"})
    assert why_unusable(silent) == "not scored: reward silent returned None"


def test_report_lists_the_most_frequent_reasons_first() -> None:
    report = failure_report("roll out", ["B", "A", "A", "C", "D", "A", "B"])
    assert report.splitlines() == [
        "roll out: all 7 rollouts failed, so there is nothing to learn from:",
        "  3 x A",
        "  2 x B",
        "  1 x C",
    ]
    assert failure_report("evaluate", ["A"]).startswith("evaluate: the only rollout failed, so")
    assert failure_report("evaluate", ["A", None]) == "evaluate: 1 of 2 rollouts failed or were not scored:\n  1 x A"
