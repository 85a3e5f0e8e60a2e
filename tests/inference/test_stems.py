from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rllm.inference.local.decoder import plain_logits
from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.slot_decoder import STEM_TOKENS
from rllm.inference.local.stems import Group, StemAttention

LIMITS = {"max_sequences": 8, "max_length": 1024, "max_bytes": 1 << 26}


@pytest.mark.parametrize("num_queries", [1, 2, 3])
def test_attention_to_stem_and_own_keys_is_attention_to_both(num_queries: int) -> None:
    groups, dim, columns = 2, 16, 32
    new = torch.Generator().manual_seed(num_queries)
    stems = [torch.randn(2, 2, groups, length, dim, generator=new) for length in (5, 300)]
    members, own = [[3, 0], [4, 1, 5]], [1, 7, 4, 30, 2, 9]  # sequence 2 has no stem
    query = torch.randn(6, groups, num_queries, dim, generator=new)
    states = torch.randn(2, 6, groups, columns, dim, generator=new)
    mask = torch.where(torch.arange(columns) < torch.tensor(own)[:, None], 0.0, -torch.inf)[:, None, None]
    attention = StemAttention([Group(*item) for item in zip(stems, members, strict=True)], num_queries)
    for layer in range(2):
        out = attention.attend(layer, query, *states, mask, 0.3)
        for number in range(6):
            seen = states[:, number, :, : own[number]]
            for stem, those in zip(stems, members, strict=True):
                seen = torch.cat([stem[layer], seen], dim=2) if number in those else seen
            torch.testing.assert_close(out[number], scaled_dot_product_attention(query[number], *seen, scale=0.3))


@pytest.mark.parametrize("length", [20, STEM_TOKENS + 20])
@torch.no_grad()
def test_equal_sequences_are_one_row_until_they_part(new_model: Any, length: int) -> None:
    model = new_model("Qwen3")
    decoder: Any = choose_decoder(model, **LIMITS)
    prompts = [[5 + (start + i) % 200 for i in range(length)] for start in (0, 0, 7, 0)]
    sequences = [list(prompts[added.index]) for added in decoder.add(prompts)]
    said = [[11, 11, 11, 11], [12, 12, 13, 12], [14, 15, 14, 14]]
    num_rows = []
    for tokens in [[sequence[-1] for sequence in sequences], *said]:
        logits = decoder.step(tokens)
        num_rows.append(len(decoder._rows))
        if tokens in said:
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.append(token)
        expected = torch.cat([plain_logits(model, sequence) for sequence in sequences])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert num_rows == [2, 2, 3, 4]
    for numbers in ([1], [0, 2], [0]):  # the others keep their order
        decoder.remove({number: sequences[number] for number in numbers})
        sequences = [sequence for number, sequence in enumerate(sequences) if number not in numbers]
        assert len(decoder._rows) == len(sequences)
        if sequences:
            logits = decoder.step([9] * len(sequences))
            sequences = [[*sequence, 9] for sequence in sequences]
            expected = torch.cat([plain_logits(model, sequence) for sequence in sequences])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (decoder._rows, decoder._prompts) == ([], [])


@torch.no_grad()
def test_a_later_sibling_finds_the_stem(new_model: Any) -> None:
    model = new_model("Qwen3")
    decoder: Any = choose_decoder(model, **LIMITS)
    ids = [5 + i % 200 for i in range(STEM_TOKENS + 3)]
    decoder.add([ids])
    decoder.step(ids[-1:])
    (added,) = decoder.add([ids])
    assert added.num_cached == len(ids) - 1
    assert len(decoder._prompts) == 1
    logits = decoder.step([9, ids[-1]])
    torch.testing.assert_close(logits[:1], plain_logits(model, [*ids, 9]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1:], plain_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_stems_that_are_wrong_for_a_model_are_found_out_before_they_are_used(
    new_model: Any, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    attend = StemAttention.attend

    def too_weak(self: StemAttention, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return attend(self, layer, query, *rest) * 0.9

    if is_wrong:
        monkeypatch.setattr(StemAttention, "attend", too_weak)
    decoder: Any = choose_decoder(new_model("Qwen3"), **LIMITS)
    assert decoder.stem_tokens == (None if is_wrong else STEM_TOKENS)


@torch.no_grad()
def test_new_weights_leave_nothing_of_a_stem(new_model: Any) -> None:
    model = new_model("Qwen3")
    decoder: Any = choose_decoder(model, **LIMITS)
    ids = [5 + i % 200 for i in range(STEM_TOKENS + 3)]
    decoder.add([ids, ids])
    before = decoder.step([ids[-1], ids[-1]])
    for weight in model.parameters():
        weight.mul_(1.1)
    decoder.clear()  # as the scheduler does at a publish
    assert [added.num_cached for added in decoder.add([ids, ids])] == [0, len(ids) - 1]
    after = decoder.step([ids[-1], ids[-1]])
    torch.testing.assert_close(after, plain_logits(model, ids).expand(2, -1), atol=1e-4, rtol=1e-4)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("length", [200, STEM_TOKENS + 244])
@torch.no_grad()
def test_little_memory_never_costs_a_sequence_its_keys(new_model: Any, length: int) -> None:
    model = new_model("Qwen3")
    tokens = 12 * (length + 12)  # too few for powers of two
    decoder: Any = choose_decoder(
        model, max_sequences=16, max_length=1024, max_bytes=tokens * 2 * 2 * 2 * 8 * 4 * 8 // 3
    )
    sequences = [[5 + i % 200 for i in range(length)]]
    decoder.add(sequences)
    decoder.step([sequences[0][-1]])
    sequences[0].append(9)
    short = [[5 + (number + i) % 200 for i in range(20)] for number in range(9)]
    sequences += [short[added.index] for added in decoder.add(short)]
    assert decoder.fits(10, length)
    for token in (7, 8):
        logits = decoder.step([sequence[-1] for sequence in sequences])
        expected = torch.cat([plain_logits(model, sequence) for sequence in sequences])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        sequences = [[*sequence, token] for sequence in sequences]
