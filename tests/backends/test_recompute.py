from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModel, DeepseekV4Config

from rllm.algorithms.batch import Batch
from rllm.algorithms.tree import build_tree
from rllm.backends.local.forward import HiddenStates, hidden_states, separate_hidden_states
from rllm.backends.local.policy import (
    Trunk,
    gated_layers,
    recomputable_layers,
    recomputing,
    running_otherwise,
    running_products_again,
)
from rllm.errors import ConfigError

Make = Callable[..., Any]
TREE = build_tree([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9], [8], [8, 1, 1, 1]], min_saved=1)


def gradients(model: Any, states: Tensor) -> dict[str, Tensor]:
    pull = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (states * pull).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    "forward_pass",
    [
        hidden_states,
        partial(hidden_states, row_tokens=1),
        partial(hidden_states, row_tokens=1, shared_saved=1),
        separate_hidden_states,
    ],
    ids=["in one row", "node by node", "with stems", "apart"],
)
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_recomputed_layers_give_the_same_gradients_bit_for_bit(
    make_model: Make, family: str, forward_pass: HiddenStates
) -> None:
    model = make_model(family).model
    expected = gradients(model, forward_pass(model, TREE))
    with recomputing(recomputable_layers(model)):
        states = forward_pass(model, TREE)
    found = gradients(model, states)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def kept_for_backward(trunk: Trunk, batch: Batch) -> int:
    sizes: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        alive, _ = trunk.before_tokens(batch)
    assert alive.requires_grad
    return sum(sizes.values())


def test_backward_pass_stores_much_less(make_model: Make, groups: Callable[..., Batch]) -> None:
    model = make_model(num_layers=6).model
    weights = sum(weight.nbytes for weight in model.parameters())
    kept, spared = (kept_for_backward(Trunk.of(model, recompute=recompute), groups()) for recompute in (False, True))
    assert spared < (kept - weights) / 3


def test_long_sequences_store_just_as_little(
    make_model: Make, groups: Callable[..., Batch], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = make_model(num_layers=6).model, groups()
    num_tokens = len(batch.tree.ids)
    short, long = (Trunk.of(model, max_tokens_kept=most) for most in (num_tokens, num_tokens - 1))
    always, never = (Trunk.of(model, recompute=recompute) for recompute in (True, False))
    assert kept_for_backward(short, batch) == kept_for_backward(never, batch)
    assert not caplog.messages
    kept_for_backward(long, batch)  # the first pass also tests the recomputation
    assert kept_for_backward(long, batch) == kept_for_backward(always, batch)
    assert [f"optim.micro_batch_tokens={num_tokens - 1}" in message for message in caplog.messages] == [True]


def test_layers_are_restored_afterwards(make_model: Make) -> None:
    layers = recomputable_layers(make_model().model)
    assert len(layers) == 2
    with recomputing(layers):
        assert "forward" in vars(layers[0])
    assert "forward" not in vars(layers[0])


def test_model_without_recomputable_layers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        recomputable_layers(torch.nn.Linear(1, 1))


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.23"), reason="since transformers 5.23 these layers do not fill it"
)
def test_layers_that_always_fill_a_cache_are_rejected() -> None:
    config = DeepseekV4Config(
        vocab_size=60,
        hidden_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        hc_mult=2,
        pad_token_id=0,
        max_position_embeddings=64,
    )
    body = AutoModel.from_config(config).eval()
    assert Trunk.of(body).recompute is False
    with pytest.raises(ConfigError, match="DeepseekV4Model"):
        Trunk.of(body, recompute=True)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_gated_layers_that_recompute_products_give_the_same_gradients_bit_for_bit(
    make_model: Make, family: str
) -> None:
    model = make_model(family).model
    expected = gradients(model, hidden_states(model, TREE))
    layers = gated_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    with running_otherwise(running_products_again(layers)):
        states = hidden_states(model, TREE)
    found = gradients(model, states)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_mlp_with_another_computation_is_not_replaced(make_model: Make) -> None:
    model = make_model().model
    mlp = model.layers[0].mlp
    mlp.forward = lambda states: mlp.down_proj(mlp.act_fn(mlp.gate_proj(states)))
    assert mlp not in gated_layers(model)
