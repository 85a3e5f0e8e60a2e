from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rllm.algorithms.batch import Batch
from rllm.backends.local.logprobs import Head, body_of
from rllm.backends.local.policy import Policy, Trunk
from rllm.errors import ConfigError

from .conftest import LLAMA_SIZES, sequence_of

SIZES = {**LLAMA_SIZES, "vocab_size": 300, "head_dim": 8, "max_position_embeddings": 64}
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_of(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **SPECIAL_IDS, **options})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(
    ("family", "options", "factor", "cap"),
    [
        ("llama", {}, 1.0, None),
        ("granite", {"logits_scaling": 8.0}, 1 / 8, None),
        ("hyperclovax", {"logits_scaling": 0.25}, 0.25, None),
        ("cohere", {"logit_scale": 0.0625}, 0.0625, None),
        ("gemma3_text", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
        ("llama4_text", {"intermediate_size_mlp": 64, "num_local_experts": 2}, 1.0, None),
        ("modernbert-decoder", {"local_attention": 8}, 1.0, None),
        ("bert", {"is_decoder": True}, 1.0, None),
        ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}, 1.0, None),
    ],
)
def test_policy_logprobs_equal_those_of_the_model(
    family: str, options: dict[str, float], factor: float, cap: float | None
) -> None:
    model = model_of(family, **options)
    ids = torch.randint(3, 300, (12,), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[3:, 0]
    policy = Policy.of(model, Trunk.of(body_of(model)))
    assert (policy.head.factor, policy.head.cap) == (factor, cap)
    batch = Batch.of([sequence_of(ids[:4].tolist(), ids[4:].tolist())])
    torch.testing.assert_close(policy.score(batch, 100), expected.detach(), atol=1e-5, rtol=0)


def test_logits_are_scaled_and_capped_with_their_gradient() -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, 3.0)
    hidden = torch.tensor([[2.0]], requires_grad=True)
    logits = Head(linear=linear, out_features=1, factor=0.5, cap=4.0)(hidden)
    logits.backward()
    assert logits.item() == pytest.approx(4.0 * math.tanh(3.0 / 4.0))
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(0.5 * 3.0 * (1 - math.tanh(3.0 / 4.0) ** 2))


class Squared(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output.__class__(**{**output, "logits": output.logits.square()})


def test_model_with_unknown_logits_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Squared .*backend=verl"):
        Head.of(Squared(LlamaConfig(vocab_size=300, **LLAMA_SIZES)).eval())


class Scaled(LlamaForCausalLM):  # type: ignore[misc]
    share: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output.__class__(**{**output, "logits": output.logits * self.share})


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1.001), (torch.bfloat16, 1.03)])
def test_model_with_slightly_different_logits_is_rejected(dtype: torch.dtype, share: float) -> None:
    model = Scaled(LlamaConfig(vocab_size=300, **LLAMA_SIZES)).eval().to(dtype)
    model.share = 1.0
    assert Head.of(model).factor == 1.0
    model.share = share
    with pytest.raises(ConfigError, match="Scaled"):
        Head.of(model)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("granite", {"logits_scaling": 7.0}),
        ("cohere", {"logit_scale": 0.07}),
        ("gemma3_text", {"final_logit_softcapping": 0.3}),
    ],
)
def test_bfloat16_rounding_is_tolerated(family: str, options: dict[str, float]) -> None:
    head = Head.of(model_of(family, **options).to(torch.bfloat16))
    assert (head.factor, head.cap) != (1.0, None)


def test_model_without_separate_body_is_rejected() -> None:
    class Whole(LlamaForCausalLM):  # type: ignore[misc]
        base_model_prefix = "nothing"

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.decoder = self._modules.pop("model")

    model = Whole(LlamaConfig(vocab_size=300, **LLAMA_SIZES))
    with pytest.raises(ConfigError, match=r"Whole .*backend=verl"):
        Head.of(model)
