"""Choice of the decoder, and attention with grouped queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rllm.inference.local import model_forward
from rllm.inference.local.decoders import choose_decoder
from rllm.inference.local.model_forward import plain_logits
from rllm.inference.local.slot_decoder import SlotDecoder

LIMITS = {"max_sequences": 4, "max_length": 512, "max_bytes": 1 << 24}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"num_key_value_heads": 1, "attention_bias": True}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("Olmo2", {}),
    ],
)
def test_full_attention_is_decoded_in_slots(new_model: Any, family: str, options: dict[str, Any]) -> None:
    assert isinstance(choose_decoder(new_model(family, **options), **LIMITS), SlotDecoder)


@torch.no_grad()
def test_decoding_stays_exact_beyond_the_first_columns(new_model: Any) -> None:
    model = new_model("Qwen3")
    decoder = choose_decoder(model, **LIMITS)
    ids = [5 + i % 200 for i in range(250)]
    decoder.add([ids])
    for token in range(20):
        logits = decoder.step(ids[-1:])
        torch.testing.assert_close(logits, plain_logits(model, ids), atol=1e-4, rtol=1e-4)
        ids.append(token)


def test_attention_with_a_position_bias_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inkling adds a bias to its scores, which newer versions of transformers pass as an argument."""
    given: list[Any] = []
    monkeypatch.setattr(model_forward, "sdpa_attention_forward", lambda *args, **options: given.append(options))
    states, mask = [torch.ones(1, heads, 3, 8) for heads in (4, 2, 2)], torch.ones(1, 1, 3, 3, dtype=torch.bool)
    model_forward.grouped_attention(None, *states, mask, position_bias=mask.float())
    assert given[0]["position_bias"] is not None
    with pytest.raises(ValueError, match="shared prefix"):
        model_forward.grouped_attention(None, *states, mask, above=object(), position_bias=mask.float())
    model_forward.grouped_attention(None, *states, mask)
    assert len(given) == 1
