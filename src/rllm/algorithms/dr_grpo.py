"""Dr. GRPO (Liu et al. 2025): GRPO without its biases towards easy or hard tasks and towards long wrong answers."""

from __future__ import annotations

from dataclasses import dataclass

from rllm.algorithms.batch import Aggregation
from rllm.algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO whose advantages are not divided by their deviation, and whose losses not by the answer's own length."""

    normalize_std: bool = False
    aggregation: Aggregation = "fixed-length"
