from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rllm.backends.local.lean_layers import lean_norms

Make = Callable[..., Any]


def test_norm_has_the_output_and_gradients_of_autograd(make_model: Make) -> None:
    torch.manual_seed(0)
    norm = make_model("Llama").model.norm
    nn.init.normal_(norm.weight)
    states = torch.randn(2, 3, len(norm.weight), requires_grad=True)
    pull = torch.randn(states.shape)
    [lean] = lean_norms([norm]).values()
    expected, found = norm(states), lean(states)
    assert found.equal(expected)
    wanted = torch.autograd.grad(expected, (norm.weight, states), pull)
    torch.testing.assert_close(torch.autograd.grad(found, (norm.weight, states), pull), wanted)


def test_norms_are_found_by_their_output(make_model: Make) -> None:
    model = make_model("Qwen3").model
    assert len(lean_norms(model.modules())) == 4 * model.config.num_hidden_layers + 1  # also of queries and keys
    plain = model.norm.forward
    model.norm.forward = lambda states, gate=None: plain(states)  # as in Mamba 2, whose layers pass a gate
    assert model.norm not in lean_norms(model.modules())
    model.norm.forward = lambda states: 2 * states
    assert model.norm not in lean_norms(model.modules())
    assert not lean_norms(make_model("Llama").to(torch.bfloat16).modules())
    assert not lean_norms(make_model("Llama").requires_grad_(False).modules())
