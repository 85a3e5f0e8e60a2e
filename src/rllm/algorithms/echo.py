"""ECHO (Shrivastava et al. 2026, arXiv:2605.24517): predict the environment's answers, with any algorithm.

The tokens between the policy's answers, such as the results of tools, pass through the forward pass anyway. Their
cross-entropy, times `Algorithm.observation_coef`, is added to the loss, so that rollouts without reward teach as well.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence


def with_observations(batch: Batch) -> tuple[Batch, Tensor]:
    """Return the sequences with M tokens, those between sampled ones among them; and [M] which were sampled.

    Tokens before the first answer are the task's, and no consequence of anything that the policy did.
    """
    wide, sampled = [], []
    for sequence in batch.sequences:
        if not sequence.spans:
            wide.append(replace(sequence, logprobs=None))
            continue
        whole = StepSpan(step_id="", start=sequence.spans[0].start, stop=sequence.spans[-1].stop)
        wide.append(TokenSequence(ids=sequence.ids, spans=[whole], logprobs=None))
        own = set(sequence.sampled_positions())
        sampled += [place in own for place in range(whole.start, whole.stop)]
    return Batch.of(wide, temperature=batch.temperature), torch.tensor(sampled, dtype=torch.bool)


def num_observed(batch: Batch) -> int:
    """Return the number of tokens between sampled ones."""
    ends = [(item.spans[0].start, item.spans[-1].stop) for item in batch.sequences if item.spans]
    return sum(stop - start for start, stop in ends) - batch.num_tokens
