"""The fastest decoder that is exact for a model, found by trying.

* `SlotDecoder`: batched, with shared prefixes, for plain full attention.
* `DynamicDecoder`: one sequence at a time with `transformers`' own cache, for sliding windows and hybrids.
* `RecomputeDecoder`: each step computes the whole sequences again, for everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from rllm.inference.local.kv_cache import BLOCK, CacheShape
from rllm.inference.local.model_forward import (
    cache_argument,
    check_causal,
    has_full_attention,
    last_logits_only,
    plain_logits,
    use_grouped_attention,
)
from rllm.inference.local.scheduler import Added, Decoder
from rllm.inference.local.slot_decoder import LEAST_SHARED, SlotDecoder

State = TypeVar("State")
logger = logging.getLogger(__name__)

_LONGEST = [7, 3, 5, 2, 11, 13, 1, 10, 12]
_PROBE = (_LONGEST, [4, 9, 6], [8], _LONGEST)
"""Prompts of different lengths, one of them twice, and longer than a block."""
_PROBE_STEPS = 3
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Allowed difference of logits as a fraction of the largest; other types are only accurate to about 5 %.

Some logits of SmolLM2 in nf4 are only accurate to 2e-4 in float32; a wrong decoder is off by hundredths.
"""


def choose_decoder(
    model: PreTrainedModel,
    *,
    max_sequences: int,
    max_length: int,
    max_bytes: int,
    original: PreTrainedModel | None = None,
    products: torch.dtype | None = None,
) -> Decoder:
    """Return the fastest decoder that gives the same logits as plain forward passes.

    The model itself is tried, not its name, so a new architecture is either served exactly or falls back.

    Args:
        model: model to run.
        max_sequences: sequences decoded at a time.
        max_length: tokens of a sequence.
        max_bytes: memory for keys and values.
        original: model that `model` is a packed copy of.
        products: format of the matrix products, if it differs from the logits' format.

    Raises:
        ConfigError: if the model is not causal, or cannot be run at all.
    """

    def slots(least_shared: int | None = None) -> Decoder:
        use_grouped_attention(model)
        limits = {"max_sequences": max_sequences, "max_length": max_length, "max_bytes": max_bytes}
        return SlotDecoder(model, _cache_shape(model), **limits, least_shared=least_shared)

    candidates: list[Callable[[], Decoder]] = [slots] if has_full_attention(model) else []
    if candidates and model.device.type == "cpu":
        candidates.insert(0, lambda: slots(BLOCK))  # a bound below the prompts of the probe
    candidates += [lambda: DynamicDecoder(model), lambda: RecomputeDecoder(model)]
    probe: _Probe | None = None
    for build in candidates if max_length >= len(_PROBE[0]) + _PROBE_STEPS else ():
        try:
            with torch.no_grad():
                probe = probe or _Probe(original or model)
                decoder = build()
                exact = _is_exact(decoder, probe, products)
        except Exception:  # a model may raise anything on arguments that it does not know; the next way may suit it
            logger.debug("%s cannot be decoded this way", type(model).__name__, exc_info=True)
            continue
        if exact:
            break
    else:
        decoder = RecomputeDecoder(original or model)
    if isinstance(decoder, SlotDecoder):
        decoder.least_shared = decoder.least_shared and LEAST_SHARED
    else:
        check_causal(original or model)
        logger.warning(
            "%s does not use plain full attention, so it is sampled by the slower %s: exact, but without batching or "
            "shared prefixes",
            type(model).__name__,
            type(decoder).__name__,
        )
    return decoder


def _cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return the shape of the states that the model caches; raise `ValueError` if its layers differ from each other."""
    cache = DynamicCache(config=model.config)
    inputs = torch.tensor([_PROBE[0]], device=model.device)
    model(input_ids=inputs, use_cache=True, **{cache_argument(model): cache})
    shapes = {tuple(states.shape) for layer in cache.layers for states in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise ValueError(f"the layers cache different shapes: {shapes}")
    _, num_heads, _, head_dim = shapes.pop()
    keys = cache.layers[0].keys
    return CacheShape(
        num_layers=len(cache.layers), num_heads=num_heads, head_dim=head_dim, dtype=keys.dtype, device=keys.device
    )


class _Probe:
    """A few ragged sequences, and the logits of a plain forward pass over each."""

    def __init__(self, model: PreTrainedModel) -> None:
        vocabulary = model.get_input_embeddings().num_embeddings
        self.prompts = [[token % vocabulary for token in prompt] for prompt in _PROBE]
        self.sequences = [list(prompt) for prompt in self.prompts]
        for index, sequence in enumerate(self.sequences):
            for _ in range(_PROBE_STEPS - 1):
                sequence.append((sequence[-1] + 1 + index) % vocabulary)
        self.logits = [  # [T, vocabulary] of each
            model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits[0]
            for sequence in self.sequences
        ]


def _is_exact(decoder: Decoder, probe: _Probe, products: torch.dtype | None) -> bool:
    """Return whether the sequences, token by token, give the logits of plain forward passes."""
    order = [added.index for added in decoder.add(probe.prompts)]
    exact = len(order) == len(probe.prompts)
    for step in range(_PROBE_STEPS):
        places = [(index, len(probe.prompts[index]) - 1 + step) for index in order]
        logits = decoder.step([probe.sequences[index][place] for index, place in places])
        expected = torch.stack([probe.logits[index][place] for index, place in places])
        tolerance = _TOLERANCE.get(products or logits.dtype, 5e-2) * expected.abs().max().clamp(min=1e-6)
        exact = exact and bool((logits - expected).abs().max() <= tolerance)
    decoder.clear()
    return exact


class _SequentialDecoder(Generic[State]):
    """One sequence at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._states: list[State] = []

    def _start(self, tokens: list[int]) -> State:
        raise NotImplementedError

    def _next_logits(self, state: State, token: int) -> torch.Tensor:
        raise NotImplementedError

    def fits(self, num_sequences: int, length: int) -> bool:
        return True

    def add(self, prompts: Sequence[list[int]]) -> list[Added]:
        self._states += [self._start(prompt[:-1]) for prompt in prompts]
        return [Added(index, 0) for index in range(len(prompts))]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.cat([self._next_logits(*pair) for pair in zip(self._states, tokens, strict=True)])

    def remove(self, ended: Mapping[int, Sequence[int]]) -> None:
        self._states = [state for number, state in enumerate(self._states) if number not in ended]

    def clear(self) -> None:
        self._states.clear()

    @property
    def cache_bytes(self) -> int:
        return 0


class DynamicDecoder(_SequentialDecoder[DynamicCache]):
    """One sequence at a time, with the cache that `transformers` builds for the model."""

    def _start(self, tokens: list[int]) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        if tokens:
            self._forward(tokens, cache)
        return cache

    def _next_logits(self, state: DynamicCache, token: int) -> torch.Tensor:
        return self._forward([token], state)

    def _forward(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        inputs = torch.tensor([tokens], device=self._model.device)
        options = {cache_argument(self._model): cache, **last_logits_only(self._model)}
        logits: torch.Tensor = self._model(input_ids=inputs, use_cache=True, **options).logits
        return logits[:, -1]


class RecomputeDecoder(_SequentialDecoder[list[int]]):
    """No cache: each step is a plain forward pass over the whole sequences."""

    def _start(self, tokens: list[int]) -> list[int]:
        return tokens

    def _next_logits(self, state: list[int], token: int) -> torch.Tensor:
        state.append(token)
        return plain_logits(self._model, state)
