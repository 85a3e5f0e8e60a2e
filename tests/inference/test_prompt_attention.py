"""Prompts whose states are stored once for all rows that begin with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.model_forward import plain_logits
from rllm.inference.local.slot_decoder import LEAST_SHARED, SlotDecoder

LIMITS = {"max_sequences": 8, "max_length": 1024, "max_bytes": 1 << 24}
LONG, LONGER, SHORT = ([5 + (factor * i) % 190 for i in range(size)] for factor, size in ((3, 150), (7, 233), (11, 20)))


def decoder_of(model: Any) -> SlotDecoder:
    decoder = choose_decoder(model, **LIMITS)
    assert isinstance(decoder, SlotDecoder)
    assert decoder.least_shared == LEAST_SHARED
    return decoder


@torch.no_grad()
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "GPT2"])
def test_logits_equal_those_of_the_model(new_model: Any, family: str) -> None:
    model = new_model(family)
    decoder = decoder_of(model)
    prompts = [LONG, SHORT, LONG, LONGER, LONG]
    sequences = [list(prompts[added.index]) for added in decoder.add(prompts)]
    for step in range(6):
        if step == 3:
            decoder.remove({1: sequences.pop(1)})
        logits = decoder.step([sequence[-1] for sequence in sequences])
        expected = torch.cat([plain_logits(model, sequence) for sequence in sequences])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for number, sequence in enumerate(sequences):
            sequence.append(7 + number * (step > 0))  # the first token is the same for all


@torch.no_grad()
def test_results_are_bitwise_independent_of_shared_prompts(new_model: Any) -> None:
    model = new_model("Llama")

    def logits(prompts: list[list[int]]) -> torch.Tensor:
        """Return the logits of the first prompt, whose answer differs from those of its copies in each token."""
        decoder = decoder_of(model)
        order = [added.index for added in decoder.add(prompts)]
        steps = []
        for step in range(4):
            tokens = [prompts[index][-1] if step == 0 else 9 + step * (index == 0) for index in order]
            steps.append(decoder.step(tokens)[order.index(0)])
        return torch.stack(steps)

    alone = logits([LONG])
    assert alone.equal(logits([LONG, *[LONG] * 6]))
    assert alone.equal(logits([LONG, SHORT, LONGER, LONG, LONGER]))


@torch.no_grad()
def test_states_of_a_prompt_are_stored_once(new_model: Any) -> None:
    decoder = decoder_of(new_model("Qwen3"))
    num_bytes = []
    for _ in range(2):
        decoder.add([LONGER])
        num_bytes.append(decoder.cache_bytes)
        decoder.clear()
        decoder.add([LONGER] * 4)
        decoder.step([7, 8, 9, 10])
    assert decoder.cache_bytes < 1.5 * num_bytes[0]


@torch.no_grad()
def test_later_turn_starts_from_an_answer_with_a_shared_prompt(new_model: Any) -> None:
    model = new_model("Qwen3")
    decoder = decoder_of(model)
    answer = [30 + i for i in range(20)]
    decoder.add([LONG])
    for token in [LONG[-1], *answer]:
        decoder.step([token])
    decoder.remove({0: LONG + answer})
    later = LONG + answer + SHORT
    [added] = decoder.add([later])
    assert added.num_cached == (len(LONG) + len(answer)) // 8 * 8
    logits = decoder.step(later[-1:])
    torch.testing.assert_close(logits, plain_logits(model, later), atol=1e-4, rtol=1e-4)
