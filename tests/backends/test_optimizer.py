from __future__ import annotations

from typing import Any

import pytest
import torch

from rllm.backends.local.optimizer import MasterAdamW
from rllm.backends.update import Schedule
from rllm.config.schema import OptimConfig


def one_weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.constant_(model.weight, value)
    return model


def pull(model: torch.nn.Linear, gradient: float) -> None:
    model.weight.grad = torch.full_like(model.weight, gradient)


def steps(optimizer: MasterAdamW, model: torch.nn.Linear, count: int, gradient: float = 1.0) -> None:
    for _ in range(count):
        pull(model, gradient)
        optimizer.step()


def test_first_step_of_adamw_is_the_learning_rate() -> None:
    model = one_weight()
    optimizer = MasterAdamW(model, OptimConfig(lr=0.1))
    pull(model, 1.0)
    assert optimizer.step() == 1.0
    assert model.weight.item() == pytest.approx(0.9)
    assert model.weight.grad is None


def test_weight_decay_is_decoupled() -> None:
    model = one_weight()
    steps(MasterAdamW(model, OptimConfig(lr=0.1, weight_decay=0.5)), model, 1)
    assert model.weight.item() == pytest.approx(1.0 - 0.1 * 0.5 - 0.1)


def test_betas_come_from_the_settings() -> None:
    model, twin = one_weight(), one_weight()
    ours = MasterAdamW(model, OptimConfig(lr=0.1, beta1=0.5, beta2=0.6, max_grad_norm=1e9))
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.5, 0.6), weight_decay=0.0, fused=True)
    for gradient in (1.0, -3.0, 0.2):
        pull(model, gradient)
        pull(twin, gradient)
        ours.step()
        theirs.step()
    assert model.weight.item() == twin.weight.item()


def test_large_gradients_are_scaled_to_the_norm() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = MasterAdamW(model, OptimConfig(lr=0.1, max_grad_norm=0.5))
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.step() == 5.0, "the norm before clipping"
    average = optimizer.state_dict()["adamw"][0]["state"][0]["exp_avg"]
    assert average.flatten().tolist() == pytest.approx([0.1 * 0.3, 0.1 * 0.4], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({"decay_steps": 4}, [1.0, 0.75, 0.5, 0.25]),
        ({"warmup_steps": 2, "decay_steps": 6}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"warmup_steps": 1, "decay_steps": 4, "decay": "cosine"}, [1.0, 1.0, 0.75, 0.25, 0.0]),
        ({"warmup_steps": 4, "decay_steps": 2}, [0.25, 0.5, 0.75, 1.0, 1.0, 0.0]),
        ({"decay_steps": 3, "decay": "cosine"}, [1.0, 0.75, 0.25, 0.0, 0.0]),
    ],
)
def test_learning_rate_rises_and_falls(settings: dict[str, Any], expected: list[float]) -> None:
    model = one_weight()
    optimizer = MasterAdamW(model, OptimConfig(lr=1.0), Schedule(lr=1.0, **settings))
    seen = []
    for _ in expected:
        steps(optimizer, model, 1)
        seen.append(optimizer.lr)
    assert seen == pytest.approx(expected)


def test_bfloat16_weights_accumulate_small_updates() -> None:
    model = one_weight(dtype=torch.bfloat16)  # its neighbours are 1/256 below and 1/128 above
    optimizer = MasterAdamW(model, OptimConfig(lr=1e-4))
    steps(optimizer, model, 10)
    assert model.weight.item() == 1.0
    steps(optimizer, model, 30)
    assert model.weight.item() == 1.0 - 1 / 256


def test_gradients_of_many_micro_batches_are_summed_in_float32() -> None:
    model = one_weight(dtype=torch.bfloat16)
    optimizer = MasterAdamW(model, OptimConfig(max_grad_norm=1e9))
    for gradient in [1.0] + [1 / 512] * 512:  # 1 + 1/512 is 1 in bfloat16
        pull(model, gradient)
        optimizer.collect()
    assert optimizer.step() == pytest.approx(2.0)


def test_frozen_weights_are_unchanged() -> None:
    model = torch.nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    before = model.bias.item()
    optimizer = MasterAdamW(model, OptimConfig(lr=0.1))
    steps(optimizer, model, 1)
    assert model.bias.item() == before


def test_offload_updates_every_weight_through_a_copy() -> None:
    model = one_weight()
    optimizer = MasterAdamW(model, OptimConfig(lr=0.1, offload=True))
    pull(model, 0.25)
    optimizer.collect()
    assert model.weight.grad is None, "gradients leave the device after each micro-batch"
    assert optimizer.step() == 0.25
    assert model.weight.item() == pytest.approx(0.9)
    without = MasterAdamW(model, OptimConfig(lr=0.1))
    without.load_state_dict(optimizer.state_dict())
    assert without.lr == 0.1
