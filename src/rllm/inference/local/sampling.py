"""Logits to tokens and log-probabilities, for a whole batch at once.

B: rows of the batch. V: vocabulary. A row's randomness is a function of its seed and its number of tokens, so an
answer does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from rllm.inference.engine import SamplingParams

_CANDIDATES = 128
"""Most probable tokens that top-p tries before it sorts the whole vocabulary."""
_COLDEST = 1e-30
"""Lowest temperature used in arithmetic: the most probable token has all of the mass well above it."""
_BLOCK = 64
"""Tokens whose probabilities are summed before one of them is chosen."""


@dataclass(kw_only=True)
class RowSettings:
    """Sampling parameters of a batch as tensors; rebuilt when its rows change."""

    scale: torch.Tensor | None
    """[B, 1]: 1 / temperature; `None` where every row has temperature 1 (or is greedy)."""
    greedy: torch.Tensor | None
    """[B]; `None` where no row is."""
    all_greedy: bool
    top_k: torch.Tensor | None
    """[B], at least 1; `None` where no row restricts it."""
    top_p: torch.Tensor | None
    """[B]; `None` where no row restricts it."""
    streams: NDArray[np.uint64]
    """[B]: start of each row's random numbers; see `streams`."""

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], seeds: Sequence[int], vocabulary: int, device: torch.device
    ) -> RowSettings:
        greedy = [row.temperature == 0 for row in rows]
        scales = [1.0 if row.temperature == 0 else 1.0 / max(row.temperature, _COLDEST) for row in rows]
        top_k = [vocabulary if row.top_k < 0 or row.temperature == 0 else min(row.top_k, vocabulary) for row in rows]
        top_p = [1.0 if row.temperature == 0 else row.top_p for row in rows]

        def tensor(values: list[float] | list[int] | list[bool], used: bool) -> torch.Tensor | None:
            return torch.tensor(values, device=device) if used else None

        scale = tensor(scales, any(value != 1.0 for value in scales))
        return cls(
            scale=None if scale is None else scale.unsqueeze(1),
            greedy=tensor(greedy, any(greedy)),
            all_greedy=all(greedy),
            top_k=tensor(top_k, min(top_k, default=vocabulary) < vocabulary),
            top_p=tensor(top_p, min(top_p, default=1.0) < 1.0),
            streams=streams(np.array(seeds, dtype=np.uint64)),
        )


def sample(
    logits: torch.Tensor,  # [B, V], any float type
    settings: RowSettings,
    num_sampled: NDArray[np.uint64],  # [B]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Greedy rows take the most probable token, and its log-probability in the model's own distribution.

    Returns:
        The tokens, [B]; their log-probabilities in the distributions that they were drawn from, [B]; and these
        distributions, [B, V], in which the tokens that top-k and top-p rule out have a probability of zero.
    """
    logits = logits.float()
    if settings.scale is not None:
        logits = logits * settings.scale
    if settings.top_k is not None:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p is not None:
        logits = keep_top_p(logits, settings.top_p)
    probabilities = logits.softmax(dim=-1)
    if settings.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = draw(probabilities, uniforms(settings.streams, num_sampled))
        if settings.greedy is not None:
            tokens = torch.where(settings.greedy, logits.argmax(dim=-1), tokens)
    return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log(), probabilities


def likeliest(probabilities: torch.Tensor, number: int) -> list[list[tuple[int, float]]]:
    """Return the most probable tokens of each row, with their log-probabilities; fewer where fewer are possible."""
    best = probabilities.topk(min(number, probabilities.shape[1]), dim=-1)
    rows = zip(best.indices.tolist(), best.values.log().tolist(), strict=True)
    return [[(token, value) for token, value in zip(*row, strict=True) if value > -inf] for row in rows]


def draw(probabilities: torch.Tensor, uniform: NDArray[np.float64]) -> torch.Tensor:
    """Draw [B] tokens by inversion: where the cumulative probability passes `uniform` [B], in [0, 1).

    The block of tokens is found first, then the token: summing all V numbers in float64, which small probabilities
    need, would take longer than the softmax.
    """
    rest = -probabilities.shape[1] % _BLOCK
    padded = pad(probabilities, (0, rest)) if rest else probabilities  # `pad` copies even what it does not change
    blocks = padded.unflatten(1, (-1, _BLOCK))  # [B, V / BLOCK, BLOCK]
    precise = torch.float32 if probabilities.device.type == "mps" else torch.float64
    places = torch.from_numpy(uniform).to(probabilities.device, precise).unsqueeze(1)
    block, places = _invert(blocks.sum(-1).to(precise), places)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)
    token, _ = _invert(inside.to(precise), places)
    # The blocks end after the vocabulary, and so does the search where a probability is NaN.
    return (block * _BLOCK + token).squeeze(1).clamp_(max=probabilities.shape[1] - 1)


def _invert(weights: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, 1] the index of the weight at each place, and the place within that weight, as a fraction.

    Places [B, 1] are fractions of the sum of `weights` [B, n].
    """
    ends = weights.cumsum(-1)
    target = places * ends[:, -1:]
    # `right` skips weights of zero, which end where the one before them does.
    chosen = torch.searchsorted(ends, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, chosen)
    within = (target - (ends.gather(1, chosen) - weight)) / weight
    return chosen, within.clamp_(0.0, 1.0 - torch.finfo(within.dtype).eps)


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Rule out all but the `top_k[b]` most probable tokens of each row (ties with the last of them stay)."""
    largest = int(top_k.max())
    if largest >= logits.shape[1]:  # some rows are not restricted
        restricted = top_k < logits.shape[1]
        logits = logits.clone()
        logits[restricted] = keep_top_k(logits[restricted], top_k[restricted])
        return logits
    kept = logits.topk(largest, dim=-1).values
    threshold = kept.gather(1, (top_k - 1).unsqueeze(1))
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Rule out all but each row's smallest set of most probable tokens that holds at least `top_p[b]` of the mass."""
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    candidates = min(_CANDIDATES, logits.shape[1])
    best = logits.topk(candidates, dim=-1).values
    mass = (best - log_total).exp().cumsum(-1)
    if candidates < logits.shape[1] and bool(((mass[:, -1] < top_p) & (top_p < 1.0)).any()):
        best = logits.sort(dim=-1, descending=True).values
        mass = (best - log_total).exp().cumsum(-1)
    last = torch.searchsorted(mass, top_p.unsqueeze(1).to(mass.dtype)).clamp_(max=best.shape[1] - 1)
    threshold = best.gather(1, last).masked_fill(top_p.unsqueeze(1) >= 1.0, -torch.inf)
    return logits.masked_fill(logits < threshold, -torch.inf)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def streams(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return seeds spread out, so that neighbouring seeds are unrelated."""
    return _mix(seeds + _GAMMA)


def uniforms(streams: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return independent uniform numbers in [0, 1), one per (stream, counter): SplitMix64 (Steele et al. 2014)."""
    state = streams + (counters + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
