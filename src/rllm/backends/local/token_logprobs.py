"""Log-probabilities of tokens from hidden states, in memory that does not grow with tokens times vocabulary.

Shapes: N tokens, V vocabulary, n tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25
"""Logits (rows times vocabulary) that exist at one time, as a bound on memory: 128 MiB in float32."""


def logprobs_and_entropy(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    *,
    temperature: float,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` [N] under softmax(head(hidden) / temperature), and entropies [N] in nats.

    Works through `CHUNK_ELEMENTS` logits at a time and, where there are more, computes them again in the backward pass,
    so that memory does not grow with N x vocabulary. The entropies are zeros without `entropy`, and carry a gradient only
    with `entropy_gradient`.
    """

    def chunk(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs, spread = TokenLogprobs.apply(logits if temperature == 1 else logits / temperature, wanted, entropy)
        return logprobs, spread if entropy and entropy_gradient else spread.detach()

    num_rows = max(CHUNK_ELEMENTS // head.out_features, 1)
    if len(targets) <= num_rows:
        return chunk(hidden, targets)
    pieces = [
        checkpoint(chunk, rows, wanted, use_reentrant=False) if torch.is_grad_enabled() else chunk(rows, wanted)
        for rows, wanted in zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
    ]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


class TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """(logits [n, V], targets [n], whether the entropy is wanted) -> log-probabilities [n], entropies [n].

    One exponential for both and for their gradients: all that is kept for these are the probabilities p. With H the
    entropy, d log p_t / d logit_i = [i = t] - p_i, and dH / d logit_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        probabilities = logits.softmax(-1)
        # The greatest probability is at least 1 / V, so its logarithm is exact where that of the target's would not be.
        log_total = logits.amax(-1) - probabilities.amax(-1).log()
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_total
        mean = torch.linalg.vecdot(probabilities, logits) if entropy else log_total
        spread = log_total - mean
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(probabilities, targets, spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        probabilities, targets, spread = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        total = torch.zeros_like(probabilities) if of_logprobs is None else probabilities * -of_logprobs[:, None]
        if of_logprobs is not None:
            total.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
        if of_entropy is not None:
            own = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, spread[:, None])
            total.addcmul_(own, of_entropy[:, None], value=-1)
        return total, None, None
