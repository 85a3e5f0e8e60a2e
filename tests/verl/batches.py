"""Random batches of several turns, whose sequences are of many lengths."""

from __future__ import annotations

import random

import torch

from rllm.algorithms.base import Algorithm
from rllm.algorithms.batch import Batch, StepSpan, TokenSequence

VOCABULARY = 200


def sequence(rng: random.Random, num_turns: int) -> TokenSequence:
    """Return a prompt, and answers with other tokens inserted between them."""
    ids, spans = words(rng, rng.randint(3, 12)), []
    for turn in range(num_turns):
        answer = words(rng, rng.randint(2, 8))
        spans.append(StepSpan(step_id=f"step {turn}", start=len(ids), stop=len(ids) + len(answer)))
        ids += answer
        if turn + 1 < num_turns:
            ids += words(rng, 3)
    num_sampled = sum(span.stop - span.start for span in spans)
    return TokenSequence(ids=ids, spans=spans, logprobs=[rng.uniform(-6, -4) for _ in range(num_sampled)])


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def batch_for(algorithm: Algorithm, *, num_sequences: int = 7, seed: int = 0, temperature: float = 1.0) -> Batch:
    """Return a batch with random advantages; an odd number of sequences, so that two workers need a filler."""
    rng = random.Random(seed)
    batch = Batch.of([sequence(rng, 1 + number % 3) for number in range(num_sequences)], temperature=temperature)
    generator = torch.Generator().manual_seed(seed)
    batch.advantages = torch.randn(batch.num_tokens, generator=generator)
    batch.trajectory_of = batch.sequence_of
    batch.rewards = torch.randn(batch.num_tokens, generator=generator)
    return batch.with_weights(algorithm.aggregation, algorithm.fixed_length)
