"""Accuracy of a policy on held-out questions: the same program for both sides."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from .workloads import END_OF_TURN, WORKLOADS, correctness, questions

NUM_QUESTIONS = {"short": 256, "sums": 100}
HELD_OUT_SEED = -2


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: Any, workload_name: str) -> float:
    """Return the share of right answers, one sampled for each question at temperature 1; restore the random state."""
    workload, number = WORKLOADS[workload_name], NUM_QUESTIONS[workload_name]
    asked = [question for (question,) in islice(questions(workload, HELD_OUT_SEED), number)]
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    tokenizer.pad_token = tokenizer.pad_token or END_OF_TURN
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
            **prompts.to(model.device),
            max_new_tokens=workload.answer_tokens,
            eos_token_id=end,
            pad_token_id=end,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    model.train(was_training)
    answers = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(correctness, asked, answers)) / number
