"""A policy learns from a teacher with another tokenisation of the same letters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rllm.inference.local.loading import load_tokenizer
from rllm.testing.tiny_policy import tiny_policy
from rllm.trainer import AgentTrainer
from rllm.types import Message
from rllm.workflows.simple_workflow import SimpleWorkflow

from .alphabet import RECIPE, STARTS_RIGHTLY, conversations, reward, tasks
from .runs import SHARED, curve_of
from .test_learning import MARGIN


def _joined(seed: int, *, starts_rightly: float) -> Iterator[list[Message]]:
    """The same conversations with letters in one word, of which a larger vocabulary makes fewer tokens."""
    for question, answer in conversations(seed, starts_rightly=starts_rightly):
        yield [question, {**answer, "content": answer["content"].replace(" ", "")}]


@pytest.mark.learning
def test_distillation_across_tokenizers_improves_the_policy(tmp_path: Path) -> None:
    skill = partial(_joined, starts_rightly=1.0)
    policy = tiny_policy(skill, partial(_joined, starts_rightly=STARTS_RIGHTLY), recipe=replace(RECIPE, vocab_size=264))
    teacher = tiny_policy(skill, skill, recipe=RECIPE)
    own, theirs = (load_tokenizer(folder).tokenizer.encode("defgh") for folder in (policy, teacher))
    assert len(theirs) < len(own)
    train_tasks, held_out = (
        [{**task, "answer": task["answer"].replace(" ", "")} for task in part] for part in tasks(seed=0)
    )
    AgentTrainer(
        workflow_class=SimpleWorkflow,
        workflow_args={"reward_function": reward},
        train_dataset=train_tasks,
        val_dataset=held_out,
        config=[
            *SHARED,
            f"model.path={policy}",
            f"run_dir={tmp_path}",
            "algorithm.name=distill",
            f"teacher.path={teacher}",
            "teacher.align=text",
        ],
    ).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = curve_of(lines).values()
    assert last > first + MARGIN
