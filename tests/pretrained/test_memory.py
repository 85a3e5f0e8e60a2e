"""The predicted peak of memory, and the measured one of a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rllm.config.sizes import GB
from rllm.demo.tasks import sum_tasks
from rllm.trainer.config import load_config
from rllm.trainer.settings import predicted_memory, prompt_tokens

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]

SETTINGS = [
    *("model.device=cpu", "num_steps=2", "tasks_per_step=2", "rollout.group_size=8", "rollout.max_tokens=48"),
    *("optim.micro_batch_tokens=2048", "optim.lr=1e-6", "save_every=0", "trackers=[jsonl]"),
]
TASKS = sum_tasks(4, seed=0)
LARGEST = 3.5 * GB
"""Bytes for steps of 16 rollouts that train all weights in float32 with the default optimizer."""


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["optim.name=adamw8bit"],
        ["model.gradient_checkpointing=true"],
        ["model.lora_rank=16"],
        ["model.lora_rank=16", "model.quantize=nf4"],
        ["model.lora_rank=16", "model.quantize=int8"],
        ["algorithm.kl_coef=0.01"],
    ],
    ids=["all weights", "adamw8bit", "checkpointing", "LoRA", "nf4", "int8", "reference"],
)
def test_peak_memory_is_within_a_fifth_of_the_prediction(smollm: Path, tmp_path: Path, settings: list[str]) -> None:
    asked = [f"model.path={smollm}", f"run_dir={tmp_path / 'run'}", *SETTINGS, *settings]
    program, found = Path(__file__).with_name("peak_of_training.py"), tmp_path / "peak"
    subprocess.run([sys.executable, str(program), str(found), *asked], check=True, timeout=900)
    measured = int(found.read_text())
    predicted = predicted_memory(load_config(asked), prompt_tokens(TASKS))
    assert predicted is not None
    assert measured == pytest.approx(predicted.peak, rel=0.2)
    assert settings or measured <= LARGEST
