"""Division of the available memory by a decoder with slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rllm.inference.local.decoders import _cache_shape
from rllm.inference.local.model_forward import plain_logits
from rllm.inference.local.slot_decoder import QUERY_STEP, PrefillItem, SlotDecoder, prefill_batches, stable_width

LENGTH = 40


@pytest.fixture
def model(new_model: Any) -> Any:
    return new_model("Qwen3")


def decoder_of(model: Any, *, num_tokens: int) -> SlotDecoder:
    """Return a decoder with memory for the keys and values of `num_tokens` tokens."""
    shape = _cache_shape(model)
    return SlotDecoder(
        model,
        shape,
        max_sequences=16,
        max_length=1024,
        max_bytes=num_tokens * shape.bytes_per_token,
    )


def test_rows_get_five_eighths_of_the_memory(model: Any) -> None:
    decoder = decoder_of(model, num_tokens=24 * LENGTH)
    assert decoder.fits(15, LENGTH)
    assert not decoder.fits(16, LENGTH)


@torch.no_grad()
def test_prompts_are_computed_in_batches_when_memory_is_short(model: Any) -> None:
    decoder = decoder_of(model, num_tokens=24 * LENGTH)
    prompts = [[5 + (20 * number + i) % 200 for i in range(LENGTH)] for number in range(8)]
    waiting, sequences, num_added = list(prompts), [], []
    while waiting:
        added = decoder.add(waiting)
        num_added.append(len(added))
        sequences += [waiting[item.index] for item in added]
        waiting = [prompt for prompt in waiting if prompt not in sequences]
    assert num_added == [3, 3, 2]  # an eighth of the memory holds three
    logits = decoder.step([sequence[-1] for sequence in sequences])
    expected = torch.cat([plain_logits(model, sequence) for sequence in sequences])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_prompts_of_different_lengths_are_computed_with_little_padding() -> None:
    lengths = [16, 16, 16, 32, 96, 96, 112, 400]  # multiples of the step that lengths are rounded up to
    items = [PrefillItem(slot=0, tokens=(7,) * length, known=[], new=[]) for length in lengths]
    batches = prefill_batches(items, max_tokens=350, max_padding=48)
    assert [[item.num_missing for item in batch] for batch in batches] == [[16, 16, 16, 32], [96, 96, 112], [400]]


@pytest.mark.parametrize("queries", [1, 2, 3, QUERY_STEP, 4 * QUERY_STEP])
def test_attention_does_not_depend_on_the_longest_row(model: Any, queries: int) -> None:
    head_dim = model.config.head_dim
    widths = sorted({stable_width(length, queries=queries, head_dim=head_dim) for length in range(1, 1100)})
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 2, size, head_dim, generator=generator) for size in (queries, 1100, 1100))
    for length in (20, 150, 193, 215, 241, 257, 300, 390, 500, 600):
        hidden = torch.zeros(1100).index_fill_(0, torch.arange(length, 1100), -torch.inf)
        found = [
            torch.nn.functional.scaled_dot_product_attention(
                query, keys[:, :, :width], values[:, :, :width], attn_mask=hidden[None, None, None, :width]
            )
            for width in widths
            if width >= length
        ]
        assert all(outcome.equal(found[0]) for outcome in found)
