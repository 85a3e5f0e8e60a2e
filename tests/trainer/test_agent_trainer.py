from __future__ import annotations

import pytest

from rllm.errors import ConfigError

from .conftest import RunTrainer


def test_sizes_are_checked(run_trainer: RunTrainer) -> None:
    with pytest.raises(ConfigError, match=r"optim\.num_minibatches=7"):
        run_trainer({"optim": {"num_minibatches": 7}})


def test_resumed_run_keeps_its_learning_rate(run_trainer: RunTrainer) -> None:
    run = run_trainer({"num_steps": 1})
    stored = (run.trainer.run_dir / "config.yaml").read_text()
    assert "\n  lr: 1.0e-06\n" in stored
    again = run_trainer({"num_steps": 2}, resume=True)
    assert (again.trainer.run_dir / "config.yaml").read_text() == stored.replace("num_steps: 1", "num_steps: 2")


def test_metrics_of_the_rllm_framework_are_logged(run_trainer: RunTrainer) -> None:
    lines = run_trainer({"num_steps": 1}, val=True).lines
    names = {name for line in lines for name in line}
    assert {"critic/score/mean", "batch/solve_partial", "val/pass@1"} <= names
