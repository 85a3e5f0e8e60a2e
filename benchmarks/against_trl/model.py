"""The policy that both sides train: a Qwen3 of 3.7 M parameters with a vocabulary of two thousand words, as an ordinary folder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from rllm.parser.chat_template import ChatTemplate
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer, warm_up
from rllm.types import Message

from .workloads import WORKLOADS, questions

RECIPE = TinyPolicyRecipe(hidden_size=256, num_layers=4, num_heads=8, num_key_value_heads=4, intermediate_size=768)
VOCABULARY = 2048
WARM_UP_STEPS = 51
"""Training steps after which the policy reverses about a third of the strings."""


def build_model(folder: Path, recipe: TinyPolicyRecipe = RECIPE, *, warm: bool = False) -> None:
    """Save the random policy, or with `warm` one that has started to learn to reverse digits."""
    tokenizer = train_tokenizer(list(_texts()), vocab_size=VOCABULARY)
    model = new_model(tokenizer, recipe)
    if warm:
        warm_up(model, ChatTemplate(tokenizer), [(_solved(), WARM_UP_STEPS)], None, batch_size=64)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _texts() -> Iterator[str]:
    """Return random words that fill the vocabulary, and the words of every prompt, so that each is one token."""
    rng = random.Random(1)
    for _ in range(1000):
        words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6))) for _ in range(20)]
        yield " ".join(["user\nreverse 1 assistant\n", *words])


def _solved() -> Iterator[list[Message]]:
    """Yield examples without end, with a seed that no training uses."""
    for (question,) in questions(WORKLOADS["short"], seed=-1):
        answer = question.removeprefix("reverse ")[::-1]
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
