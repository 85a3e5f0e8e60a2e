"""Runs over several datasets, and runs that sample by outcomes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rllm.data.dataset import Dataset
from rllm.errors import ConfigError
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.episode_records import stored_episodes

from .conftest import BACKEND, RunTrainer, ask


def one_is_easy(word: str, base_url: str) -> float:
    ask(base_url, word)
    return float(word == "fig")


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_resumed_run_samples_like_the_uninterrupted_one(
    run_trainer: RunTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, max_staleness: int
) -> None:
    def settings(run: str, num_steps: int) -> dict[str, Any]:
        return {
            "run_dir": str(tmp_path / run),
            "num_steps": num_steps,
            "save_every": 3,
            "data": {"sampling": "easy_first"},
            "rollout": {"group_size": 2, "max_staleness": max_staleness},
        }

    def tasks_of(run: str) -> list[tuple[int, str]]:
        episodes = stored_episodes(tmp_path / run)
        return sorted({(episode.info["training_step"], episode.task_id) for episode in episodes})

    run_trainer(settings("whole", 5), agent=one_is_easy)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("data.sampling=easy_first" in warning for warning in warnings) == 1
    run_trainer(settings("parts", 3), agent=one_is_easy)
    run_trainer(settings("parts", 5), agent=one_is_easy, resume=True)
    assert tasks_of("whole") == tasks_of("parts")


def run_of(tmp_path: Path, data: Any, *settings: str) -> AgentTrainer:
    common = [f"run_dir={tmp_path}/run", f"backend={BACKEND}", "model.path=scripted", "trackers=[jsonl]", "num_steps=2"]
    return AgentTrainer(agent_run_func=one_is_easy, train_dataset=data, config=[*common, *settings])


def test_several_datasets_have_their_shares_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "fruit.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in ("fig", "kiwi")))
    tools = Dataset([{"word": "saw"}, {"word": "axe"}], name="tools")
    trainer = run_of(
        tmp_path, [tmp_path / "fruit.jsonl", tools], "data.weights=[3,1]", "tasks_per_step=4", "rollout.group_size=2"
    )
    assert trainer.sampler.in_words()[0] == "tasks by source: 75% fruit, 25% tools"
    trainer.train()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    measured = {name: value for name, value in line.items() if name.startswith("source/")}
    assert measured["source/fruit/share"] == 0.75
    assert measured["source/tools/reward"] == measured["source/tools/accuracy"] == 0.0
    assert 0.0 < measured["source/fruit/accuracy"] < 1.0
    sources = Counter(episode.info["source"] for episode in stored_episodes(tmp_path / "run"))
    assert sources == {"fruit": 2 * 3 * 2, "tools": 2 * 1 * 2}


def test_mismatched_dataset_weights_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.weights=\[3\.0, 1\.0\]"):
        run_of(tmp_path, [{"word": "fig"}], "data.weights=[3,1]")
    assert not (tmp_path / "run").exists()
