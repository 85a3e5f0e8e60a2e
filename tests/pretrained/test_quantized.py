"""QLoRA and 8-bit AdamW by bitsandbytes: a tiny model's numbers, and a pretrained model that learns in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.batch import Batch
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.optimizer import MasterAdamW
from rllm.config.schema import OptimConfig
from rllm.inference.local.quantized import QuantizedLinear
from rllm.trainer.config import load_config

from .test_exact import QUESTIONS, answers, asked, sequence_of

pytestmark = pytest.mark.pretrained


def linear(dtype: torch.dtype = torch.float32, width: int = 96) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(width, 33, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("width", [96, 63])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_levels_equal_those_of_the_paper(dtype: torch.dtype, width: int) -> None:
    """Each block of 64 numbers is scaled to its largest, and then rounded to the nearest of sixteen."""
    from bitsandbytes.functional import get_4bit_type

    layer = linear(dtype, width)
    values = get_4bit_type("nf4", device="cpu")
    flat = layer.weight.float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scales = padded.abs().amax(1, keepdim=True)
    nearest = values[((padded / scales).unsqueeze(-1) - values).abs().argmin(-1)] * scales
    expected = nearest.flatten()[: len(flat)].view_as(layer.weight).to(dtype)
    quantized = QuantizedLinear(layer, "nf4")
    torch.testing.assert_close(quantized.weight, expected)
    assert torch.equal(copy.deepcopy(quantized).weight, quantized.weight)
    assert sum(part.nbytes for part in (quantized.codes, quantized.scales)) == -(-len(flat) // 2) + 4 * len(scales)


def test_int8_equals_that_of_bitsandbytes() -> None:
    from bitsandbytes.functional import int8_vectorwise_quant

    codes, scales, _ = int8_vectorwise_quant(linear().weight)
    quantized = QuantizedLinear(linear(), "int8")
    assert torch.equal(quantized.codes, codes)
    torch.testing.assert_close(quantized.scales.flatten() * 127, scales)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradient_equals_that_of_the_dequantized_layer(kind: Any) -> None:
    quantized, plain = QuantizedLinear(linear(), kind), linear()
    plain.weight = torch.nn.Parameter(quantized.weight)
    states = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    found = []
    for layer in (quantized, plain):
        inputs = states.clone().requires_grad_()
        layer(inputs).square().sum().backward()
        found.append(inputs.grad)
    torch.testing.assert_close(*found)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)

    def step(self, optimizer: MasterAdamW, place: int) -> None:
        ids = torch.arange(place, place + 20)
        (self.layer(self.embedding(ids % 100)) - 1).square().mean().backward()
        optimizer.step()


def trained(make: Callable[[Tiny], MasterAdamW], num_steps: int) -> tuple[Tiny, MasterAdamW]:
    model = Tiny()
    optimizer = make(model)
    for place in range(num_steps):
        model.step(optimizer, place)
    return model, optimizer


def optimizer_of(name: Any, **options: Any) -> Callable[[Tiny], MasterAdamW]:
    return lambda model: MasterAdamW(model, OptimConfig(name=name, lr=1e-2, **options))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"weight_decay": 0.1, "beta1": 0.5}], ids=str)
def test_8_bit_adamw_steps_are_close_to_those_of_adamw(options: dict[str, Any]) -> None:
    """Of embeddings, whose averages keep 32 bits, only the gradients differ."""
    start, (ours, _), (plain, _) = (
        Tiny(),
        *(trained(optimizer_of(name, **options), 8) for name in ("adamw8bit", "adamw")),
    )
    for name in ("embedding", "layer"):
        one, other, before = (getattr(model, name).weight.detach() for model in (ours, plain, start))
        assert difference(one - before, other - before) < 0.05
        assert difference(other, before) > 0.01


def test_8_bit_averages_are_used_except_for_embeddings() -> None:
    (_, ours), (_, plain) = (trained(optimizer_of(name), 1) for name in ("adamw8bit", "adamw"))
    saved = plain.memory()["optimizer"] - ours.memory()["optimizer"]
    assert (
        2 * 6400 * 3 - 2048 - 8 * 6400 / 256 - 64 <= saved <= 2 * 6400 * 3
    )  # less the tables, and a scale for each 256 numbers


@pytest.mark.parametrize("offload", [False, True])
def test_8_bit_adamw_resumes_bit_for_bit(offload: bool, tmp_path: Path) -> None:
    make = optimizer_of("adamw8bit", offload=offload)
    model, optimizer = trained(make, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = Tiny()
    resumed.load_state_dict(model.state_dict())
    other = make(resumed)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for place in range(3, 6):
        model.step(optimizer, place)
        resumed.step(other, place)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_model_is_sampled_in_batches_with_the_trainer_numbers(
    kind: str, smollm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["model.device=cpu", "model.lora_rank=16", f"model.quantize={kind}"]
    backend = LocalBackend.from_config(load_config([f"model.path={smollm}", *settings]))
    try:
        assert "RecomputeDecoder" not in caplog.text
        found = answers(backend, list(map(asked, QUESTIONS)), temperature=1.0, max_tokens=12)
        scores = backend.score(Batch.of(list(map(sequence_of, found))))
        sampled = torch.tensor([logprob for answer in found for logprob in answer.logprobs or ()])
        torch.testing.assert_close(sampled, scores, atol=1e-3, rtol=0)
    finally:
        backend.close()
