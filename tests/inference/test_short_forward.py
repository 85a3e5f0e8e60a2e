from __future__ import annotations

from typing import Any

import pytest
import torch

from rllm.inference.local import attention
from rllm.inference.local.decoder import plain_logits
from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.short_forward import ShortForward, _steadily

LIMITS = {"max_sequences": 4, "max_length": 512, "max_bytes": 1 << 24}


@pytest.mark.parametrize(
    ("family", "options", "used"),
    [
        ("Qwen3", {}, True),
        ("Llama", {"num_key_value_heads": 4}, True),
        ("Llama", {"num_key_value_heads": 1, "attention_bias": True}, True),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, True),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
        ("Qwen2", {}, True),
        ("Mistral", {"sliding_window": None}, True),
        ("Olmo2", {}, False),
    ],
)
def test_it_is_used_for_the_families_it_knows(new_model: Any, family: str, options: dict[str, Any], used: bool) -> None:
    decoder: Any = choose_decoder(new_model(family, **options), **LIMITS)
    assert isinstance(decoder._short_forward, ShortForward) is used


def test_a_model_that_only_looks_alike_is_not_trusted_to_it(new_model: Any) -> None:
    model = new_model("Llama")
    model.model.norm.forward = lambda hidden: hidden * 2  # a change that the short forward does not know of
    decoder: Any = choose_decoder(model, **LIMITS)
    assert decoder._short_forward is None


@torch.no_grad()
def test_it_stays_exact_beyond_the_columns_it_began_with(new_model: Any) -> None:
    model = new_model("Qwen3")
    decoder = choose_decoder(model, **LIMITS)
    ids = [5 + i % 200 for i in range(250)]
    decoder.add([ids])
    for token in range(20):
        logits = decoder.step(ids[-1:])
        torch.testing.assert_close(logits, plain_logits(model, ids), atol=1e-4, rtol=1e-4)
        ids.append(token)


@pytest.mark.parametrize("width", [91, 4864])
def test_an_activation_is_the_same_whatever_other_rows_there_are(width: int) -> None:
    rows = 3 * torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = _steadily(torch.nn.functional.silu, rows.clone())
    finally:
        torch.set_num_threads(threads)
    apart = [_steadily(torch.nn.functional.silu, row.expand(4, -1).contiguous())[0] for row in rows]
    assert torch.equal(together, torch.stack(apart))


def test_what_grouped_attention_does_not_know_goes_transformers_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inkling adds a bias to its scores, which newer versions of transformers hand on as an argument."""
    given: list[Any] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **options: given.append(options))
    states, mask = [torch.ones(1, heads, 3, 8) for heads in (4, 2, 2)], torch.ones(1, 1, 3, 3, dtype=torch.bool)
    attention.grouped_attention(None, *states, mask, position_bias=mask.float())
    assert given[0]["position_bias"] is not None
    with pytest.raises(ValueError, match="takes no keys from above"):
        attention.grouped_attention(None, *states, mask, above=object(), position_bias=mask.float())
    attention.grouped_attention(None, *states, mask)
    assert len(given) == 1
