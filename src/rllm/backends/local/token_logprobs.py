"""Log-probabilities of tokens from hidden states, in memory that does not grow with tokens times vocabulary.

Shapes: N tokens, V vocabulary, n tokens of one chunk, m of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25
"""Logits (rows times vocabulary) that exist at one time, as a bound on memory: 128 MiB in float32."""
BLOCK_ELEMENTS = 2**18
"""Logits that a CPU works through at a time, 1 MiB in float32: what one operation writes is still in its cache for the next."""


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
        logprobs, spread = TokenLogprobs.apply(head(rows), wanted, temperature, entropy)
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
    """(logits [n, V], targets [n], temperature, whether the entropy is wanted) -> log-probabilities [n], entropies [n].

    In float32 at least, whatever the format of the logits. Nothing but these is kept for the gradients, for which the
    probabilities p are computed again. With H the entropy and x the logits over the temperature,
    d log p_t / dx_i = [i = t] - p_i, and dH / dx_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        logprobs = logits.new_empty(len(logits), dtype=_precise(logits))
        spread = torch.zeros_like(logprobs)
        for block in _blocks(logits):
            scores = _scores(logits[block], temperature)
            probabilities = scores.softmax(-1)
            # The greatest probability is at least 1 / V, so its logarithm is exact where that of the target's would not be.
            log_total = scores.amax(-1) - probabilities.amax(-1).log()
            logprobs[block] = scores.gather(-1, targets[block, None]).squeeze(-1) - log_total
            if entropy:
                spread[block] = log_total - torch.linalg.vecdot(probabilities, scores)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, spread)
        ctx.temperature = temperature
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, targets, spread = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        of_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            probabilities = _scores(logits[block], ctx.temperature).softmax(-1)
            total = torch.zeros_like(probabilities)
            if of_logprobs is not None:
                torch.mul(probabilities, -of_logprobs[block, None], out=total)
                total.scatter_add_(-1, targets[block, None], of_logprobs[block, None])
            if of_entropy is not None:
                own = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, spread[block, None])
                total.addcmul_(own, of_entropy[block, None], value=-1)
            of_logits[block] = total if ctx.temperature == 1 else total.div_(ctx.temperature)
        return of_logits, None, None, None


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """[m, V] what the softmax is taken of."""
    scores = logits.to(_precise(logits))
    return scores if temperature == 1 else scores / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    """The rows in runs that are computed at a time: as many as a CPU's cache holds, elsewhere all."""
    num_rows, vocabulary = logits.shape
    size = max(BLOCK_ELEMENTS // vocabulary, 1) if logits.device.type == "cpu" else max(num_rows, 1)
    return (slice(start, start + size) for start in range(0, num_rows, size))
