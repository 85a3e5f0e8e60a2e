"""Rollouts that run ahead of the updates: how far, how they end, and that without it nothing differs."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from rllm.store import open_store
from rllm.trainer.async_loop import AsyncTrainingLoop

from . import mortal_run
from .conftest import TASKS, RunTrainer, ScriptedBackend, ask
from .test_loop import At, interrupt, step_words
from .test_resume import assert_the_same, model, quiet, rollouts_of  # noqa: F401


@pytest.mark.slow
def test_zero_staleness_equals_the_synchronous_loop_bit_for_bit(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mortal_run.trainer_of(tmp_path / "plain", model, 2).train()
    monkeypatch.setattr("rllm.trainer.agent_trainer.TrainingLoop", AsyncTrainingLoop)
    mortal_run.trainer_of(tmp_path / "async", model, 2).train()
    assert_the_same(tmp_path / "async", tmp_path / "plain")


def test_rollouts_start_as_early_as_staleness_allows(run_trainer: RunTrainer) -> None:
    next_step_has_begun = threading.Event()
    versions: list[int] = []
    turns = {task["word"]: itertools.count() for task in TASKS}

    def overlapping(word: str, base_url: str) -> float:
        versions.append(ScriptedBackend.latest.weight_version)
        if len(versions) > 6:
            next_step_has_begun.set()
        assert next_step_has_begun.wait(timeout=60), "no rollout of the second step began during the first"
        ask(base_url, word)
        return float(next(turns[word]) % 2)

    config = {"num_steps": 4, "rollout": {"max_staleness": 1, "max_concurrent": 7}}
    run = run_trainer(config, agent=overlapping)
    assert sum(word in step_words(0) for word in run.words[:7]) == 6, "rollouts of the first step take precedence"
    assert len(versions) == 4 * 6, "each step was rolled out once, and none after the last"
    for line in run.lines:
        assert line["tokens/staleness_max"] <= 1
        assert "tokens/per_second_rollout" not in line, "the time of a rollout spans several steps"
    with open_store(str(run.trainer.run_dir / "traces.db"), read_only=True) as store:
        for info in store.sessions():
            (trace,) = store.by_session(info.id)
            assert trace.weight_version is not None
            assert trace.weight_version >= info.metadata["training_step"] - 1
    assert run.backend.algorithms[0].correction == "truncate", "samples of older weights are corrected"


def test_failure_of_an_early_rollout_is_reported_at_its_step(run_trainer: RunTrainer) -> None:
    def failing(word: str, base_url: str) -> float:
        if word in step_words(1):
            raise ValueError("no such fruit")
        ask(base_url, word)
        return float(len(base_url) % 2)

    from rllm.errors import RolloutError

    run = run_trainer({"rollout": {"max_staleness": 1}}, agent=failing, raises=RolloutError)
    assert "no such fruit" in str(run.error)
    assert run.steps == [1]
    assert run.backend.saved_at == [1], "the previous step is saved"


def test_error_of_a_run_takes_precedence_over_those_of_early_rollouts(
    run_trainer: RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no memory is left")

    def slow_ahead(word: str, base_url: str) -> float:
        if next(turn) >= 6:
            ended.wait(timeout=60)
        ask(base_url, word)
        return float(len(word) % 2)

    monkeypatch.setattr(ScriptedBackend, "publish", fail)
    turn, ended = itertools.count(), threading.Event()
    run = run_trainer({"rollout": {"max_staleness": 1}}, agent=slow_ahead, raises=ValueError)
    ended.set()
    assert str(run.error) == "no memory is left"


def test_early_rollouts_are_repeated_after_an_interruption(run_trainer: RunTrainer) -> None:
    config = {"num_steps": 5, "save_every": 1, "rollout": {"max_staleness": 2}}
    stopped = run_trainer(config, raises=KeyboardInterrupt, trackers=[At(2, interrupt)])
    assert stopped.steps == [1, 2]
    resumed = run_trainer(config, resume=True)
    assert resumed.steps == [1, 2, 3, 4, 5]
    stored = [(split, task_id, index) for split, task_id, index, _ in rollouts_of(resumed.trainer.run_dir)]
    assert len(stored) == len(set(stored)) == 5 * 6


@pytest.mark.slow
def test_answers_continue_across_updates_of_a_real_policy(model: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer = mortal_run.trainer_of(tmp_path / "run", model, 4, max_staleness=2)
    result = trainer.train()
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    ages = [line["tokens/staleness_max"] for line in lines if "timing/step_s" in line]
    assert len(ages) == 4
    assert ages[0] == 0
    assert 1 <= max(ages) <= 2
