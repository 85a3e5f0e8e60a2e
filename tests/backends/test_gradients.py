"""Gradients that are added up in place, against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rllm.backends.local.gradients import summing_in_place

IDS = torch.tensor([[1, 2, 0], [3, 1, 0]])


class Tied(nn.Module):
    """Embeddings that are used as the head, too, and a layer that is used twice; token 0 is padding."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(5, 4, padding_idx=0)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embeddings.weight
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embeddings(ids)
        for _ in range(2):
            states = checkpoint(self._run, states, use_reentrant=False) if self.again else self._run(states)
        return self.head(states)

    def _run(self, states: Tensor) -> Tensor:
        return torch.tanh(self.layer(states))


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("again", [False, True], ids=["kept", "run again"])
def test_they_are_those_of_autograd(again: bool) -> None:
    model = Tied(again=again)
    for _ in range(2):
        model(IDS).cos().sum().backward()
    expected = gradients(model)
    for _ in range(2):
        with summing_in_place(model):
            model(IDS).cos().sum().backward()
    torch.testing.assert_close(gradients(model), expected)


def test_no_gradient_waits_for_that_of_another_use() -> None:
    model, seen = Tied(again=False), []
    with summing_in_place(model):
        states = model.layer(torch.ones(1, 4))
        states.register_hook(lambda _: seen.append(model.layer.weight.grad is not None))
        model.layer(states).sum().backward()
    assert seen == [True]


def test_frozen_weights_get_none() -> None:
    model = Tied(again=False)
    model.embeddings.weight.requires_grad_(False)
    model.layer.bias.requires_grad_(False)
    with summing_in_place(model):
        model(IDS).sum().backward()
    embeddings, weight, bias = gradients(model)
    assert embeddings is None
    assert bias is None
    assert weight is not None
