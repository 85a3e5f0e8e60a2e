"""Quantized weights below an adapter give the results of dequantized ones. `tests/pretrained` tests those of bitsandbytes."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rllm.algorithms.batch import Batch
from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.lora import LoraSettings
from rllm.errors import ConfigError, MissingDependencyError
from rllm.inference.local.loading import save_model
from rllm.inference.local.quantized import QuantizedLinear, dequantized_weights, quantize
from rllm.trainer.config import load_config

from .conftest import sequence_of, strengthen

SMALL = LoraSettings(rank=2, alpha=4)
CPU = torch.device("cpu")


def linear(weight: list[list[float]]) -> torch.nn.Linear:
    layer = torch.nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.weight = torch.nn.Parameter(torch.tensor(weight), requires_grad=False)
    return layer


def test_int8_has_a_scale_for_each_row() -> None:
    layer = QuantizedLinear(linear([[1.27, -0.5, 0.013], [0.0, 0.0, 0.0], [12.7, 0.04, -0.06]]), "int8")
    assert layer.codes.tolist() == [[127, -50, 1], [0, 0, 0], [127, 0, -1]]
    expected = [[1.27, -0.5, 0.01], [0.0, 0.0, 0.0], [12.7, 0.0, -0.1]]
    torch.testing.assert_close(layer.weight, torch.tensor(expected))
    assert sum(weight.nbytes for weight in layer.parameters()) == 9 + 3 * 4


def dequantized(model: Any, kind: Any) -> Any:
    """Return a copy of a model with the dequantized weights of its quantized form."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                child.weight = torch.nn.Parameter(QuantizedLinear(child, kind).weight)
    return twin


def gradients(backend: LocalBackend, batch: Batch) -> dict[str, Tensor]:
    backend.accumulate(batch, GRPO())
    found = {name: weight.grad for name, weight in backend.model.named_parameters() if weight.grad is not None}
    backend.model.zero_grad()
    return found


def batch_of(*sequences: list[int]) -> Batch:
    batch = Batch.of([sequence_of(ids[:3], ids[3:]) for ids in sequences]).with_weights("token-mean")
    batch.advantages = torch.arange(1.0, 1.0 + len(batch.ids))
    batch.old_logprobs = torch.full((len(batch.ids),), -3.0)
    return batch


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_quantized_weights_compute_the_same_as_dequantized_ones(
    make_model: Callable[..., Any], make_backend: Callable[..., LocalBackend], recompute: bool
) -> None:
    model = make_model()
    twin = make_backend(dequantized(model, "int8"), lora=SMALL)
    backend = make_backend(model, lora=SMALL, quantize="int8", gradient_checkpointing=recompute)
    for each in (twin, backend):
        strengthen(each)
    assert sum(isinstance(layer, QuantizedLinear) for layer in backend.model.modules()) == 14

    batch = batch_of([5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12])
    torch.testing.assert_close(backend.score(batch), twin.score(batch), atol=1e-5, rtol=0)
    torch.testing.assert_close(backend.score_reference(batch), twin.score_reference(batch), atol=1e-5, rtol=0)
    expected = gradients(twin, batch)
    assert expected
    torch.testing.assert_close(gradients(backend, batch), expected, atol=1e-5, rtol=1e-4)

    answer = asyncio.run(backend.inference.complete([5, 6, 7], max_tokens=6, ignore_eos=True, seed=0))
    sampled = Batch.of([sequence_of([5, 6, 7], answer.completion_ids)])
    torch.testing.assert_close(torch.tensor(answer.logprobs), twin.score(sampled), atol=1e-4, rtol=0)


def test_metrics_count_quantized_weights_at_their_size(
    make_model: Callable[..., Any], make_backend: Callable[..., LocalBackend]
) -> None:
    model = make_model()
    layers = sum(layer.weight.numel() for layer in model.model.layers.modules() if type(layer) is torch.nn.Linear)
    scales = sum(len(layer.weight) for layer in model.model.layers.modules() if type(layer) is torch.nn.Linear)
    plain = make_backend(copy.deepcopy(model), lora=SMALL).memory()["weights"]
    assert make_backend(model, lora=SMALL, quantize="int8").memory()["weights"] == plain - 3 * layers + 4 * scales


def test_copies_of_the_model_share_its_quantized_weights(
    make_model: Callable[..., Any], make_backend: Callable[..., LocalBackend]
) -> None:
    backend = make_backend(make_model(num_layers=1), lora=SMALL, quantize="int8", overlap=True)
    ours = {weight.data_ptr() for name, weight in backend.model.named_parameters() if name.endswith(".codes")}
    theirs = {
        weight.data_ptr() for name, weight in backend.inference.model.named_parameters() if name.endswith(".codes")
    }
    assert ours == theirs


def test_weights_are_dequantized_to_the_dtype_of_the_model(make_model: Callable[..., Any]) -> None:
    model = make_model().to(torch.bfloat16).requires_grad_(False)
    fraction = quantize(model, "int8", CPU)
    assert 0 < fraction < 1
    assert {layer.weight.dtype for layer in model.modules() if isinstance(layer, QuantizedLinear)} == {torch.bfloat16}
    assert type(model.lm_head) is torch.nn.Linear
    assert model(input_ids=torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16


def test_adapter_on_quantized_weights_is_saved_and_resumed(
    make_model: Callable[..., Any], make_backend: Callable[..., LocalBackend], tmp_path: Path
) -> None:
    backend, resumed = (make_backend(make_model(), lora=SMALL, quantize="int8") for _ in range(2))
    strengthen(backend)
    backend.save(tmp_path)
    resumed.load(tmp_path)
    batch = batch_of([5, 6, 7, 8, 9, 10])
    assert torch.equal(resumed.score(batch), backend.score(batch))


def test_server_gets_an_ordinary_folder_of_the_dequantized_model(
    make_model: Callable[..., Any], make_backend: Callable[..., LocalBackend], tmp_path: Path
) -> None:
    backend = make_backend(make_model(num_layers=1), lora=SMALL, quantize="int8")
    strengthen(backend)
    save_model(backend.model, tmp_path, state_dict=dequantized_weights(backend.model))
    served = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), backend.adapter.off():
        torch.testing.assert_close(served(ids).logits, backend.model(ids).logits)


@pytest.mark.parametrize(
    ("overrides", "about", "message"),
    [
        (["model.quantize=int8"], None, r"model\.quantize='int8': .* set model\.lora_rank=16"),
        (["model.quantize=int8", "model.lora_rank=2"], "gptq", r"quantized \(gptq\).* use the original model"),
        (["model.quantize=nf4", "model.lora_rank=2"], None, r"'bitsandbytes'.*rllm\[quantize\]"),
        (["optim.name=adamw8bit"], None, r"optim\.name='adamw8bit' needs the package 'bitsandbytes'"),
    ],
)
def test_unsupported_settings_are_rejected_before_loading(
    overrides: list[str],
    about: str | None,
    message: str,
    make_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = make_model().config
    if about is not None:
        config.quantization_config = {"quant_method": about}
    config.save_pretrained(tmp_path)
    with pytest.raises((ConfigError, MissingDependencyError), match=message):
        LocalBackend.check(load_config([f"model.path={tmp_path}", "model.device=cpu", *overrides]))
