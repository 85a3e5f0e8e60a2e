"""A pretrained model learns to add, a resumed run ends the same, and the result is trained further and teaches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rllm.demo.tasks import sum_tasks
from rllm.tracking.about import seal
from rllm.trainer.agent_sft_trainer import AgentSFTTrainer

from ..trainer.reproducible import reproducible
from .conftest import DemoRun, run_demo
from .sums import GAIN, lines_of, train

pytestmark = pytest.mark.pretrained


def test_demo_improves_the_accuracy(trained: DemoRun) -> None:
    assert trained.before < 0.2
    assert trained.after >= trained.before + GAIN
    steps = [line for line in lines_of(trained.folder) if "policy/loss" in line]
    assert max(line["policy/sampler_gap_max"] for line in steps) < 1e-3
    assert sum(line.get("rollout/num_failed", 0) for line in steps) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_demo_improves_the_accuracy_with_other_seeds(smollm: Path, tmp_path: Path, seed: int) -> None:
    run = run_demo(tmp_path, "--model", str(smollm), "--seed", str(seed))
    assert run.after >= run.before + GAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["model.lora_rank=16", "optim.lr=1e-3"], ["rollout.max_staleness=1", "optim.lr=3e-5"]],
    ids=["LoRA", "asynchronous"],
)
def test_other_training_methods_improve_as_much(smollm: Path, tmp_path: Path, settings: list[str]) -> None:
    lines = train(smollm, tmp_path / "run", "rollout.resample_rounds=3", "eval.every=15", *settings, evaluate=True)
    before, after = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert after >= before + GAIN


@pytest.mark.slow
def test_run_resumed_at_an_earlier_checkpoint_equals_the_uninterrupted_one(trained: DemoRun, tmp_path: Path) -> None:
    ended_early = tmp_path / "ended-early"
    shutil.copytree(trained.folder, ended_early)
    shutil.rmtree(ended_early / "checkpoints" / trained.checkpoint.name)
    seal(ended_early)  # like a run that was started here
    resumed = run_demo(tmp_path, resume="ended-early")
    assert list(map(reproducible, lines_of(resumed.folder))) == list(map(reproducible, lines_of(trained.folder)))
    assert (resumed.checkpoint / "model.safetensors").read_bytes() == (
        trained.checkpoint / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_trained_model_learns_from_demonstrations(trained: DemoRun, tmp_path: Path) -> None:
    def shown(seed: int, count: int) -> list[dict[str, object]]:
        return [
            {
                "messages": [
                    {"role": "user", "content": task["question"]},
                    {"role": "assistant", "content": f"The answer is {task['answer']}."},
                ]
            }
            for task in sum_tasks(count, seed=seed)
        ]

    AgentSFTTrainer(
        [
            *(f"model.path={trained.checkpoint}", f"run_dir={tmp_path / 'run'}", "model.device=cpu"),
            *("num_steps=6", "tasks_per_step=8", "eval.every=0", "save_every=0", "trackers=[jsonl]"),
        ],
        shown(0, 48),
        shown(-1, 16),
    ).train()
    losses = [line["eval/loss"] for line in lines_of(tmp_path / "run") if "eval/loss" in line]
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_model_learns_from_the_trained_one_as_teacher(smollm: Path, trained: DemoRun, tmp_path: Path) -> None:
    settings = ["algorithm.name=distill", f"teacher.path={trained.checkpoint}", "num_steps=6", "rollout.group_size=4"]
    lines = train(smollm, tmp_path / "run", *settings)
    distances = [line["policy/teacher_kl"] for line in lines if "policy/teacher_kl" in line]
    assert distances[-1] < 0.7 * distances[0], json.dumps(distances)
