import json

import pytest

from rllm.engine.failures import Reason
from rllm.evaluation.report import Cost, Outcome, TaskReport, report_on, with_costs
from rllm.types import Episode, Step, Trajectory


def right(task_id, index, **fields):
    return Outcome(task_id=task_id, index=index, is_correct=True, rewards={"agent": 1.0}, **fields)


def wrong(task_id, index, **fields):
    return Outcome(task_id=task_id, index=index, rewards={"agent": 0.0}, **fields)


def test_failed_counts_as_wrong_and_unscored_does_not():
    report = report_on(
        [
            right("a", 0),
            Outcome(task_id="a", index=1, failure="AgentError: row 1"),
            Outcome(task_id="a", index=2, failure="AgentError: row 2"),
            right("b", 0),
            wrong("b", 1),
            Outcome(task_id="b", index=2, unscored="it has no reward"),
        ]
    )
    assert report.accuracy is not None
    assert report.accuracy.value == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert (report.num_rollouts, report.num_correct, report.num_failed, report.num_unscored) == (6, 2, 2, 1)
    assert report.mean_reward == pytest.approx(2 / 3)
    assert report.failures == [Reason(text="AgentError: row 1", count=2, num_variants=2)]
    assert report.unscored == [Reason(text="it has no reward", count=1)]
    assert {k: (estimate.value, estimate.num_tasks) for k, estimate in report.pass_at_k.items()} == {
        1: (pytest.approx(5 / 12), 2),
        2: (pytest.approx((2 / 3 + 1) / 2), 2),
        3: (1.0, 1),  # only task a has three that count
    }


def test_costs_are_means_over_known_rollouts():
    report = report_on(
        [
            right("a", 0, cost=Cost(prompt_tokens=10.0, sampled_tokens=4.0, num_calls=1.0, seconds=1.0)),
            wrong("a", 1, cost=Cost(prompt_tokens=30.0, sampled_tokens=8.0, num_calls=3.0, seconds=2.0)),
            Outcome(task_id="a", index=2, failure="RolloutTimeout: slow", cost=Cost(seconds=6.0)),
        ]
    )
    assert report.cost == Cost(prompt_tokens=20.0, sampled_tokens=6.0, num_calls=2.0, seconds=3.0)
    assert report.tasks == [
        TaskReport(
            task_id="a",
            num_rollouts=3,
            num_correct=1,
            num_failed=1,
            num_unscored=0,
            accuracy=1 / 3,
            mean_reward=0.5,
            cost=report.cost,
        )
    ]


def test_each_role_has_its_own_mean_reward():
    rewards = [{"solver": 1.0, "judge": 0.5}, {"solver": 0.0}]
    report = report_on([Outcome(task_id="a", index=index, rewards=item) for index, item in enumerate(rewards)])
    assert report.rewards == {"judge": 0.5, "solver": 0.5}
    assert report.mean_reward == pytest.approx((0.75 + 0.0) / 2)


@pytest.mark.parametrize("failure", [None, "AgentError: no"])
def test_accuracy_is_absent_if_nothing_was_scored(failure):
    unscored = Outcome(task_id="a", index=0, unscored="it has no reward")
    report = report_on([unscored, Outcome(task_id="b", index=0, failure=failure, unscored=None if failure else "no")])
    assert report.accuracy is None
    assert report.pass_at_k == {}
    assert report.mean_reward is None
    assert report.tasks[0].accuracy is None


def test_report_is_json():
    data = json.loads(json.dumps(report_on([right("a", 0), wrong("a", 1)]).to_dict()))
    assert data["accuracy"] == data["pass_at_k"]["1"]
    assert data["pass_at_k"]["2"]["value"] == 1.0
    assert data["cost"]["prompt_tokens"] is None


def episode(*steps: Step, **fields):
    return Episode(task_id="a", trajectories=[Trajectory(name="solver", steps=list(steps), reward=0.5)], **fields)


def test_tokens_are_counted_over_all_calls_of_a_rollout():
    calls = [Step(prompt_ids=[1, 2], response_ids=[3]), Step(prompt_ids=[1, 2, 3, 4], response_ids=[5, 6])]
    outcome = Outcome.of(with_costs(episode(*calls, metrics={"rollout/num_calls": 2.0, "timing/rollout_s": 0.25})))
    cost = Cost(prompt_tokens=6.0, sampled_tokens=3.0, num_calls=2.0, seconds=0.25)
    assert outcome == Outcome(task_id="a", index=0, rewards={"solver": 0.5}, cost=cost)


def test_missing_token_ids_are_unknown_instead_of_zero():
    assert Outcome.of(with_costs(episode(Step(prompt_ids=[1], response_ids=[2]), Step()))).cost.sampled_tokens is None


def test_failed_rollout_is_never_correct():
    error = {"type": "AgentError", "message": "no", "traceback": ""}
    outcome = Outcome.of(episode(is_correct=True, info={"error": error}))
    assert (outcome.is_correct, outcome.failure, outcome.rewards) == (False, "AgentError: no", {})
