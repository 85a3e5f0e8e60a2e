"""Accuracy of a policy on questions that it is not trained on: the same program for both sides."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from .workloads import WORKLOADS, correctness, questions

NUM_QUESTIONS = 256
HELD_OUT_SEED = -2


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: Any) -> float:
    """The share of right answers, one sampled for each question at temperature 1; leaves random numbers as they were."""
    workload = WORKLOADS["short"]
    asked = [question for (question,) in islice(questions(workload, HELD_OUT_SEED), NUM_QUESTIONS)]
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in asked],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
        tokenizer_kwargs={"padding_side": "left"},
    )
    was_training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = model.generate(
            **prompts, max_new_tokens=workload.answer_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
    model.train(was_training)
    answers = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(correctness, asked, answers)) / NUM_QUESTIONS
