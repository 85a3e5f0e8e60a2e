"""The peak of memory that is predicted, and the one that is measured in a process of its own."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from rllm.demo.tasks import sum_tasks
from rllm.trainer import AgentTrainer
from rllm.trainer.config import load_config
from rllm.trainer.settings import predicted_memory, prompt_tokens
from rllm.types import Task
from rllm.workflows.simple_workflow import SimpleWorkflow

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]

SETTINGS = [
    *("model.device=cpu", "num_steps=2", "tasks_per_step=2", "rollout.group_size=8", "rollout.max_tokens=48"),
    *("optim.micro_batch_tokens=2048", "optim.lr=1e-6", "save_every=0", "trackers=[jsonl]"),
]


def is_even(task: Task, answer: str) -> float:
    """A reward that differs within nearly every group."""
    return float(len(answer) % 2 == 0)


def tasks_of(num_times: int) -> list[dict[str, object]]:
    return [
        {**task, "question": "Read the whole of it before you answer. " * num_times + str(task["question"])}
        for task in sum_tasks(4, seed=0)
    ]


def peak_of_training(settings: list[str], num_times: int) -> int:
    """Train for two steps, and return the most bytes that this process held."""
    AgentTrainer(
        workflow_class=SimpleWorkflow,
        workflow_args={"reward_function": is_even},
        train_dataset=tasks_of(num_times),
        config=settings,
    ).train()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize(
    ("num_times", "settings"),
    [
        (0, []),
        (0, ["model.lora_rank=16"]),
        (0, ["model.lora_rank=16", "model.quantize=nf4"]),
        (0, ["model.lora_rank=16", "model.quantize=int8"]),
        (0, ["algorithm.kl_coef=0.01"]),
        (0, ["optim.name=adamw8bit"]),
        (0, ["model.gradient_checkpointing=true"]),
        (0, ["model.dtype=bfloat16"]),
        (60, ["model.lora_rank=16"]),
    ],
    ids=str,
)
def test_the_peak_is_within_a_fifth_of_what_is_predicted(
    smollm: Path, tmp_path: Path, num_times: int, settings: list[str]
) -> None:
    asked = [f"model.path={smollm}", f"run_dir={tmp_path / 'run'}", *SETTINGS, *settings]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        measured = pool.apply(peak_of_training, (asked, num_times))
    predicted = predicted_memory(load_config(asked), prompt_tokens(tasks_of(num_times)))
    assert predicted is not None
    assert measured == pytest.approx(predicted.peak, rel=0.2)
