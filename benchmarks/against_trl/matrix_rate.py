"""Rate at which this machine multiplies matrices of a model's shapes, which bounds the speed of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a model's matrices for one token; attention itself is not counted."""

    body: float
    head: float

    @classmethod
    def of(cls, model: Any) -> Flops:
        head = model.get_output_embeddings().weight
        body = sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and module.weight is not head
        )
        return cls(body=2.0 * body, head=2.0 * head.numel())


@torch.no_grad()
def matrix_rate(model: Any, num_rows: int, repeats: int = 5) -> float:
    """Return floating-point operations per CPU-second of products with all the model's matrices, best of `repeats`."""
    weights = [module.weight.detach() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(num_rows, weight.shape[1], dtype=weight.dtype) for weight in weights}
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        best = min(best, time.process_time() - started)
    return 2.0 * num_rows * sum(weight.numel() for weight in weights) / best


def read_rate(repeats: int = 5) -> float:
    """Return bytes of main memory read per CPU-second, best of `repeats`."""
    numbers = torch.ones(2**27)
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        numbers.sum()
        best = min(best, time.process_time() - started)
    return numbers.nbytes / best
