from __future__ import annotations

from rllm.compat.metric_names import known_eval_metrics, known_training_metrics
from rllm.types import Episode, Trajectory

FAILED = {"error": {"type": "AgentError", "message": "", "traceback": ""}}


def episode(task: str, correct: bool, source: str | None = None, *, failed: bool = False) -> Episode:
    return Episode(
        task_id=task,
        task={} if source is None else {"data_source": source},
        is_correct=correct,
        trajectories=[Trajectory(reward=float(correct))],
        info=FAILED if failed else {},
    )


def test_training_metric_names() -> None:
    found = known_training_metrics(
        [
            episode("a", True),
            episode("a", True),
            episode("b", False),
            episode("b", True),
            episode("c", False, failed=True),
        ]
    )
    assert found == {
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "batch/solve_all": 1.0,
        "batch/solve_none": 1.0,
        "batch/solve_partial": 1.0,
    }
    assert "critic/score/mean" not in known_training_metrics([episode("a", False, failed=True)])


def test_evaluation_metric_names() -> None:
    twice = [
        episode("a", True, "math"),
        episode("a", False, "math"),
        episode("b", False, "gsm"),
        episode("b", False, "gsm"),
    ]
    assert known_eval_metrics(twice) == {
        "val/pass@1": 0.25,
        "val/pass@2": 0.5,
        "val/math/pass@1": 0.5,
        "val/math/pass@2": 1.0,
        "val/gsm/pass@1": 0.0,
        "val/gsm/pass@2": 0.0,
    }
    assert known_eval_metrics([episode("a", True)]) == {"val/pass@1": 1.0}
    assert known_eval_metrics([*twice[:2], episode("b", False)]) == {
        "val/pass@1": 0.25,
        "val/pass@2": 0.5,
        "val/math/pass@1": 0.5,
        "val/math/pass@2": 1.0,
    }
