from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rllm.algorithms.batch import Batch
from rllm.backends.local.logprobs import body_of
from rllm.backends.local.policy import Policy, Trunk
from rllm.backends.local.summed_gradients import can_sum, summed, summed_linear


def gradients(layers: list[nn.Module], run: Callable[[], Tensor]) -> list[Tensor]:
    """Return the gradients of two passes together."""
    for _ in range(2):
        output = run()
        (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    weights = [weight for layer in layers for weight in layer.parameters()]
    found = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


def test_summed_gradients_equal_those_of_autograd() -> None:
    torch.manual_seed(0)
    table, layer = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 3)
    ids = torch.tensor([[1, 2, 3], [3, 3, 0]])
    forward = summed([table, layer])
    expected = gradients([table, layer], lambda: layer(table(ids)))
    found = gradients([table, layer], lambda: forward[layer](forward[table](ids)))
    torch.testing.assert_close(found, expected)
    assert not found[0][2].any()


def test_input_may_be_recomputed_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    layer, gate, up = nn.Linear(4, 3, bias=False), nn.Linear(2, 4), nn.Linear(2, 4)
    states = torch.randn(5, 2)

    def product(one: Tensor, other: Tensor) -> Tensor:
        return one.sigmoid() * other

    expected = gradients([layer, gate, up], lambda: layer(product(gate(states), up(states))))
    found = gradients([layer, gate, up], lambda: summed_linear(layer, gate(states), up(states), prepare=product))
    torch.testing.assert_close(found, expected)


def test_other_layers_are_left_to_autograd() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert not summed([frozen, nn.Bilinear(2, 2, 2), nn.Embedding(3, 2, sparse=True)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_sum(nn.Linear(2, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_policy_gradients_equal_those_of_plain_forward_passes(
    make_model: Callable[..., Any], groups: Callable[..., Batch], tied: bool
) -> None:
    model = make_model("Llama", tie_word_embeddings=tied)
    policy = Policy.of(model, Trunk.of(body_of(model)))
    batch = groups()

    def plain() -> Tensor:
        found = []
        for sequence in batch.sequences:
            ids = torch.tensor([sequence.ids])
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            found.append(scores[[place - 1 for place in sequence.sampled_positions()], 0])
        return torch.cat(found)

    expected = gradients([model], plain)
    torch.testing.assert_close(gradients([model], lambda: policy.logprobs(batch)[0]), expected, rtol=1e-3, atol=1e-4)
