from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from rllm.inference.local.packed import PackedLinear, PackedModel, RowwiseActivation, can_pack, multiplies_bfloat16

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

IN_BFLOAT16 = pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN has no products in bfloat16 here")
SHAPES = [(256, 1024), (300, 32), (896, 896), (2, 7), (1, 64)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 2e-2, marks=IN_BFLOAT16)]
)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_equal_those_of_the_layer(
    dtype: torch.dtype, tolerance: float, outputs: int, inputs: int, bias: bool
) -> None:
    linear = nn.Linear(inputs, outputs, bias=bias)
    packed = PackedLinear(linear, dtype)
    rows = torch.randn(3, 5, inputs)
    with torch.no_grad():
        found, expected = packed(rows), linear(rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=IN_BFLOAT16)])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[:3])
def test_result_of_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(inputs, outputs), dtype)
    rows = torch.randn(200, inputs)
    with torch.no_grad():
        expected = packed(rows)
        assert all(torch.equal(packed(row), whole) for row, whole in zip(rows, expected, strict=True))
        for count in (1, 2, 3, 4, 7, 8, 31, 64, 65, 128, 199):
            assert torch.equal(packed(rows[:count]), expected[:count]), count
            assert torch.equal(packed(rows[-count:]), expected[-count:]), count


def test_packed_model_shares_tensors_and_follows_updates(new_model: Any) -> None:
    model = new_model(tie_word_embeddings=False)
    assert can_pack(model)
    packed = PackedModel(model)
    assert all(mine is theirs for mine, theirs in zip(packed.module.parameters(), model.parameters(), strict=True)), (
        "the packed model has no second copy of the weights"
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(ids).logits
        torch.testing.assert_close(packed.module(ids).logits, before, atol=1e-4, rtol=0)
        model.lm_head.weight.mul_(2)
        packed.drop()
        torch.testing.assert_close(packed.module(ids).logits, 2 * before, atol=1e-4, rtol=0)


def test_only_float32_models_on_a_cpu_are_packed(new_model: Any) -> None:
    assert not can_pack(new_model().to(torch.bfloat16))
    assert not can_pack(new_model().to("meta"))


OLD = """
import torch
from rllm.inference.local.packed import PackedModel
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
packed, rows = PackedModel(model, autocast=True), torch.randn(8, 64)
assert packed.products == torch.float32
with torch.no_grad():
    torch.testing.assert_close(packed.module(rows), model(rows))
"""


@pytest.mark.slow
@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU has no bfloat16 products either")
def test_cpu_without_bfloat16_products_uses_float32() -> None:
    subprocess.run([sys.executable, "-c", OLD], env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}, check=True)


@pytest.mark.parametrize("width", [91, 4864])
def test_activation_does_not_depend_on_other_rows(width: int) -> None:
    activation = RowwiseActivation(nn.SiLU())
    rows = 3 * torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = activation(rows)
    finally:
        torch.set_num_threads(threads)
    apart = [activation(row.expand(4, -1))[0] for row in rows]
    assert torch.equal(together, torch.stack(apart))


def test_packed_model_wraps_its_activations(new_model: Any) -> None:
    mlp = PackedModel(new_model("Qwen3")).module.model.layers[0].mlp
    assert isinstance(mlp.act_fn, RowwiseActivation)
