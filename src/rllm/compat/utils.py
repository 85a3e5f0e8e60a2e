"""Functions that scripts of the rLLM framework call on their results; they print as well as return."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllm.errors import counted
from rllm.evaluation import pass_at_k
from rllm.evaluation.pass_at_k import PassAtK
from rllm.types import Trajectory

__all__ = ["compute_pass_at_k", "save_trajectories"]


def compute_pass_at_k(results: Sequence[Trajectory]) -> PassAtK:
    """See `rllm.evaluation.pass_at_k.compute_pass_at_k`; the result is also printed."""
    found = pass_at_k.compute_pass_at_k(results)
    print(found)  # noqa: T201
    return found


def save_trajectories(
    results: Sequence[Any], save_dir: str | Path = "./trajectories", filename: str = "trajectories.pt"
) -> Path:
    """Write results to a file that `torch.load(path, weights_only=False)` reads; return and print its path."""
    import torch

    path = Path(save_dir, filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(list(results), path)
    print(f"saved {counted(len(results), 'trajectory', 'trajectories')} to {path}")  # noqa: T201
    return path
