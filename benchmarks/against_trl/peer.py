"""TRL's side: its own trainer, configured like ours. A conversation's turns are trained separately, as by default.

Turns are micro-batches of one update, each sampled separately, so that no prompt is padded to the length of later
turns.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from .jobs import Job
from .watch import Watch
from .workloads import END_OF_TURN, WORKLOADS, Workload, correctness, turns_apart, vowels


def train(job: Job, watch: Watch) -> None:
    """Train until the watch ends it."""
    workload = WORKLOADS[job.workload]
    reward = correctness if workload.warm or job.target is not None else vowels

    def rewards(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **_: Any) -> list[float]:
        watch.num_tokens += sum(map(len, completion_ids))
        pairs = zip(prompts, completions, strict=True)
        return [reward(prompt[-1]["content"], completion[0]["content"]) for prompt, completion in pairs]

    num_rows = workload.num_prompts * workload.num_turns * job.num_steps
    rows = [{"prompt": prompt} for prompt in islice(turns_apart(workload, job.seed), num_rows)]
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.eos_token = END_OF_TURN  # TRL ends answers here; SmolLM2's converted tokenizer has another eos
    with tempfile.TemporaryDirectory() as scratch:
        GRPOTrainer(
            model=job.model,
            reward_funcs=rewards,
            args=_config(job, workload, scratch),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[_Progress(watch)],
        ).train()


def _config(job: Job, workload: Workload, scratch: str) -> GRPOConfig:
    rows = min(job.peer_rows or workload.num_rollouts, workload.num_rollouts)
    parts = workload.num_rollouts // rows
    return GRPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=workload.num_turns * parts,
        steps_per_generation=parts,
        generation_kwargs={} if workload.warm else {"min_new_tokens": workload.answer_tokens},
        num_generations=workload.group_size,
        max_completion_length=workload.answer_tokens,
        max_steps=job.num_steps,
        shuffle_dataset=False,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        seed=job.seed,
        use_cpu=job.device == "cpu",
        bf16=job.autocast,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )


class _Progress(TrainerCallback):  # type: ignore[misc]
    """Callback that reports to the watch, and stops when the watch ends the run."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._watch.start(given["model"], given["processing_class"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop |= not self._watch.step_done(given["model"], given["processing_class"])
