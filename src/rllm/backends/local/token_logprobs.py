"""Log-probabilities of tokens from hidden states, in memory that does not grow with tokens times vocabulary.

Tokens that follow the same ones are drawn from one distribution, as the first tokens of all answers to a prompt: it is computed
once.

Shapes: N tokens, drawn from U distributions over a vocabulary of V; n tokens and u distributions of one chunk, m of one block.
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
    state_of: Tensor | None = None,
    temperature: float,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` [N] under softmax(head(hidden) / temperature), and entropies [N] in nats.

    `hidden` [U, hidden size] are the states, and `state_of` [N] says which of them each target is drawn from; `None`: target
    by target.

    Works through `CHUNK_ELEMENTS` logits at a time and, where there are more, computes them again in the backward pass,
    so that memory does not grow with U x vocabulary. The entropies are zeros without `entropy`, and carry a gradient only
    with `entropy_gradient`.
    """

    def chunk(states: Tensor, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, spread = TokenLogprobs.apply(head(states), rows, wanted, temperature, entropy)
        return logprobs, spread if entropy and entropy_gradient else spread.detach()

    if state_of is None:
        state_of = torch.arange(len(targets), device=targets.device)
    rows, order = state_of.sort(stable=True)
    wanted = targets[order]
    num_rows = max(CHUNK_ELEMENTS // head.out_features, 1)
    if len(hidden) <= num_rows:
        logprobs, spread = chunk(hidden, rows, wanted)
    else:
        pieces = []
        for states, start, tokens in zip(hidden.split(num_rows), *_runs(rows, len(hidden), num_rows), strict=True):
            given = states, rows[tokens] - start, wanted[tokens]
            again = torch.is_grad_enabled()
            pieces.append(checkpoint(chunk, *given, use_reentrant=False) if again else chunk(*given))
        logprobs, spread = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return logprobs[order.argsort()], spread[state_of]


class TokenLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """(logits [u, V], row [n] of each target, rising, targets [n], temperature, whether the entropy is wanted)
    -> log-probabilities [n], entropies [u].

    In float32 at least, whatever the format of the logits. Nothing but these is kept for the gradients, for which the
    probabilities p are computed again. With H the entropy and x the logits over the temperature,
    d log p_t / dx_i = [i = t] - p_i, and dH / dx_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = logits.new_empty(len(targets), dtype=_precise(logits))
        spread = logprobs.new_zeros(len(logits))
        for block, tokens in _blocks(logits, rows):
            scores = _scores(logits[block], temperature)
            probabilities = scores.softmax(-1)
            # The greatest probability is at least 1 / V, so its logarithm is exact where that of the target's would not be.
            log_total = scores.amax(-1) - probabilities.amax(-1).log()
            row = rows[tokens] - block.start
            logprobs[tokens] = scores[row, targets[tokens]] - log_total[row]
            if entropy:
                spread[block] = log_total - torch.linalg.vecdot(probabilities, scores)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, rows, targets, spread)
        ctx.temperature = temperature
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits, rows, targets, spread = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        of_logits = torch.empty_like(logits)
        for block, tokens in _blocks(logits, rows):
            probabilities = _scores(logits[block], ctx.temperature).softmax(-1)
            total = torch.zeros_like(probabilities)
            if of_logprobs is not None:
                row, pull = rows[tokens] - block.start, of_logprobs[tokens]
                of_row = pull.new_zeros(len(total)).index_add_(0, row, pull)
                torch.mul(probabilities, -of_row[:, None], out=total)
                total.view(-1).index_add_(0, row * total.shape[1] + targets[tokens], pull)
            if of_entropy is not None:
                own = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, spread[block, None])
                total.addcmul_(own, of_entropy[block, None], value=-1)
            of_logits[block] = total if ctx.temperature == 1 else total.div_(ctx.temperature)
        return of_logits, None, None, None, None


def _precise(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """[m, V] what the softmax is taken of."""
    scores = logits.to(_precise(logits))
    return scores if temperature == 1 else scores / temperature


def _blocks(logits: Tensor, rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """The logits in blocks that are computed at a time, as many as a CPU's cache holds, elsewhere all; and the tokens of each."""
    num_rows, vocabulary = logits.shape
    size = max(BLOCK_ELEMENTS // vocabulary, 1) if logits.device.type == "cpu" else max(num_rows, 1)
    for start, tokens in zip(*_runs(rows, num_rows, size), strict=True):
        yield slice(start, start + size), tokens


def _runs(rows: Tensor, num_rows: int, size: int) -> tuple[range, list[slice]]:
    """Where each `size` of `num_rows` rows begin, and which tokens are theirs; `rows` [n], rising, are the tokens' own."""
    starts = range(0, num_rows, size)
    if len(starts) < 2:
        return starts, [slice(None)] * len(starts)
    ends = torch.searchsorted(rows, torch.tensor([*starts[1:], num_rows], device=rows.device)).tolist()
    return starts, [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
