from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rllm.backends.local.rms_norm import QuickRMSNorm, use_quick_norms

Make = Callable[..., Any]


def quick(norm: nn.Module) -> nn.Module:
    """What becomes of a norm."""
    model = nn.Sequential(copy.deepcopy(norm))
    use_quick_norms(model)
    return model[0]


def test_it_divides_by_the_root_of_the_mean_square() -> None:
    norm = QuickRMSNorm(nn.Parameter(torch.tensor([1.0, 2.0])), 0.5)
    # The mean square of (3, 4) is 12.5, and with eps 13.
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[3 / 13**0.5, 8 / 13**0.5]]))


def test_its_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 2, 4), (4,)))
    norm = QuickRMSNorm(nn.Parameter(weight), 1e-6)
    assert torch.autograd.gradcheck(norm, (inputs.requires_grad_(),))

    def of_weight(weight: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(norm, {"weight": weight}, (inputs.detach(),))
        return outputs

    assert torch.autograd.gradcheck(of_weight, (weight.requires_grad_(),))


def test_it_is_what_the_model_did_before_in_values_and_gradients() -> None:
    norm = Qwen3RMSNorm(8)
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(2))
    found = []
    for module in (norm, quick(norm)):
        given = inputs.clone().requires_grad_()
        outputs = module(given)
        (outputs * torch.arange(8)).sum().backward()
        found.append((outputs, given.grad, module.weight.grad))
    assert isinstance(quick(norm), QuickRMSNorm)
    torch.testing.assert_close(found[1], found[0])


def test_the_weight_is_the_same_parameter_under_the_same_name(make_model: Make) -> None:
    model = make_model("Qwen3").model
    before = dict(model.named_parameters())
    use_quick_norms(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    modules = list(model.modules())
    assert any(isinstance(module, QuickRMSNorm) for module in modules)
    use_quick_norms(model)
    assert list(model.modules()) == modules, "a second time changes nothing"


def test_autocast_rounds_hidden_states_once_and_leaves_queries_and_keys_precise(make_model: Make) -> None:
    model = make_model("Qwen3").model
    use_quick_norms(model)
    hidden = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        formats = {
            name: module(hidden[..., : len(module.weight)]).dtype
            for name, module in model.named_modules()
            if isinstance(module, QuickRMSNorm)
        }
    of_states = {name for name, dtype in formats.items() if dtype == torch.bfloat16}
    assert of_states == {name for name in formats if not name.endswith(("q_norm", "k_norm"))}


class BiasedRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 1


@pytest.mark.parametrize(
    "norm", [GemmaRMSNorm(8), BiasedRMSNorm(8), nn.LayerNorm(8), Qwen3RMSNorm(8).to(torch.bfloat16)], ids=repr
)
def test_a_norm_that_computes_something_else_stays(norm: nn.Module) -> None:
    assert type(quick(norm)) is type(norm)


def test_frozen_weights_get_no_gradient() -> None:
    norm = QuickRMSNorm(nn.Parameter(torch.ones(4), requires_grad=False), 1e-6)
    inputs = torch.randn(2, 4, requires_grad=True)
    norm(inputs).sum().backward()
    assert norm.weight.grad is None
    assert inputs.grad is not None
