from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.functional import linear

from rllm.algorithms.grpo import GRPO
from rllm.inference.local import wide_linear
from rllm.inference.local.wide_linear import WideLinear, use_wide_products

Make = Callable[..., Any]

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN, so nothing is changed"
)


@pytest.fixture
def helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU where oneDNN is faster, and with products of every size."""
    monkeypatch.setattr(wide_linear, "helps_here", lambda: True)
    monkeypatch.setattr(wide_linear, "_WORTH_IT", 1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what oneDNN has computed."""
    seen: list[tuple[int, ...]] = []
    product = wide_linear.linear_product

    def watched(*given: Any) -> torch.Tensor:
        seen.append(tuple(product(*given).shape))
        return product(*given)

    monkeypatch.setattr(wide_linear, "linear_product", watched)
    return seen


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_it_is_a_product_with_the_gradients_of_its_formula() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[2.0, 3.0]]), torch.tensor([5.0])
    inputs = torch.tensor([[1.0, 10.0], [4.0, 100.0]], requires_grad=True)
    outputs = WideLinear(layer)(inputs)
    (outputs * torch.tensor([[1.0], [7.0]])).sum().backward()
    torch.testing.assert_close(outputs, torch.tensor([[37.0], [313.0]]))
    torch.testing.assert_close(inputs.grad, torch.tensor([[2.0, 3.0], [14.0, 21.0]]))
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[29.0, 710.0]]))
    torch.testing.assert_close(layer.bias.grad, torch.tensor([8.0]))


@needs_onednn
@pytest.mark.usefixtures("helps")
@pytest.mark.parametrize("shape", [(9, 6), (2, 3, 6), (1, 6), (0, 6), (6,)], ids=str)
@pytest.mark.parametrize("num_outputs", [3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_its_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], num_outputs: int, bias: bool) -> None:
    layer = nn.Linear(6, num_outputs, bias=bias)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found = []
    for module in (layer, WideLinear(copy.deepcopy(layer))):
        given = inputs.clone().requires_grad_()
        outputs = module(given)
        (outputs * torch.arange(num_outputs)).sum().backward()
        found.append((outputs, given.grad, *(parameter.grad for parameter in module.parameters())))
    torch.testing.assert_close(found[1], found[0])


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_inputs_and_gradients_may_lie_anyhow() -> None:
    layer, inputs = nn.Linear(6, 4), torch.randn(6, 5, generator=torch.Generator().manual_seed(2)).t().requires_grad_()
    found, expected = WideLinear(layer)(inputs).t(), linear(inputs, layer.weight, layer.bias).t()
    torch.testing.assert_close(found, expected)
    pull = torch.ones(1, 1).expand(4, 5)
    wanted = [inputs, layer.weight]
    for one, other in zip(
        torch.autograd.grad(found, wanted, pull), torch.autograd.grad(expected, wanted, pull), strict=True
    ):
        torch.testing.assert_close(one, other)


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_no_product_is_computed_of_what_is_frozen(products: list[tuple[int, ...]]) -> None:
    layer = WideLinear(nn.Linear(6, 4).requires_grad_(False))
    layer(torch.ones(5, 6, requires_grad=True)).sum().backward()
    assert products == [(5, 4), (5, 6)]
    assert layer.weight.grad is None


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_inputs_are_kept_for_the_gradient_of_weights_only() -> None:
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    for is_trained, expected in ((True, [(5, 6), (4, 6)]), (False, [(4, 6)])):
        layer, inputs = WideLinear(nn.Linear(6, 4).requires_grad_(is_trained)), torch.ones(5, 6, requires_grad=True)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(inputs).sum().backward()
        assert kept == expected


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_hooks_go_on_and_so_do_the_weights_that_they_compute() -> None:
    layer, seen = nn.Linear(6, 4), []
    layer.register_forward_hook(lambda _module, _inputs, outputs: seen.append(tuple(outputs.shape)))
    model = nn.Sequential(nn.utils.prune.identity(layer, "weight"))
    names = [name for name, _ in model.named_parameters()]
    use_wide_products(model)
    assert isinstance(model[0], WideLinear)
    assert [name for name, _ in model.named_parameters()] == names == ["0.bias", "0.weight_orig"]
    model(torch.ones(5, 6)).sum().backward()
    assert seen == [(5, 4)]
    torch.testing.assert_close(model[0].weight_orig.grad, torch.full((4, 6), 5.0))


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_onednn_is_given_no_expanded_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    product, strides = wide_linear.linear_product, []
    monkeypatch.setattr(
        wide_linear,
        "linear_product",
        lambda *given: strides.append(given[0].stride() + given[1].stride()) or product(*given),
    )
    WideLinear(nn.Linear(6, 4))(torch.ones(5, 6, requires_grad=True)).sum().backward()
    assert len(strides) == 3
    assert not any(0 in found for found in strides)


@needs_onednn
def test_small_products_and_other_formats_are_those_of_torch(products: list[tuple[int, ...]]) -> None:
    layer = WideLinear(nn.Linear(256, 512))
    large, small = torch.ones(256, 256), torch.ones(255, 256)
    layer(small)
    with torch.autocast("cpu"):
        assert layer(large).dtype == torch.bfloat16
    copy.deepcopy(layer).double()(large.double())
    assert products == []
    layer(large)
    assert products == [(256, 512)]


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_a_model_keeps_its_weights_under_their_names(make_model: Make) -> None:
    model = make_model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    use_wide_products(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert isinstance(model.get_output_embeddings(), WideLinear)
    assert not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize(
    ("capability", "vendor", "helps"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_it_helps_where_mkl_leaves_avx_512_out(
    capability: str, vendor: str, helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(wide_linear, "_CPU_INFO", info)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert wide_linear.helps_here.__wrapped__() is (helps and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    monkeypatch.setattr(wide_linear, "_CPU_INFO", tmp_path / "none")
    assert not wide_linear.helps_here.__wrapped__()


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_the_gradient_of_a_batch_is_that_of_plain_layers_and_the_sampler_packs_its_own(
    make_backend: Make, groups: Make, products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, found = groups(2, 7).with_weights("seq-mean-token-mean"), []
    for helps in (True, False):
        monkeypatch.setattr(wide_linear, "helps_here", lambda helps=helps: helps)
        backend = make_backend(lr=1e-3)
        packed = backend.inference._packed
        assert packed is None or packed._layers
        products.clear()
        batch.old_logprobs = backend.score(batch)
        backend.accumulate(batch, GRPO())
        assert bool(products) is helps
        found.append({name: weight.grad for name, weight in backend.model.named_parameters()})
    torch.testing.assert_close(*found)


@needs_onednn
@pytest.mark.usefixtures("helps")
def test_a_second_sampler_of_a_model_packs_what_the_first_one_packed(make_backend: Make, make_model: Make) -> None:
    model, counts = make_model(), []
    for _ in range(2):
        backend = make_backend(model)
        packed = backend.inference._packed
        counts.append(packed and len(packed._layers))
        backend.close()
    assert counts[0] == counts[1]
