"""Metrics that a killed and resumed run reproduces bit for bit, on the CPU in float32."""

import re
from collections.abc import Mapping

_VARIES = re.compile(r"(^|/)(timing|memory)/|^tokens/per_second")


def reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return all metrics except times, rates and memory."""
    return {name: value for name, value in metrics.items() if not _VARIES.search(name)}
