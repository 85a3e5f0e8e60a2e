"""A plain line for each training step, for terminals and log files alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from rllm.types import Episode

SHOWN = {
    "rollout/reward": "reward {:.3f}",
    "policy/nll": "loss {:.3f}",
    "policy/teacher_kl": "divergence from the teacher {:.3f}",
    "eval/loss": "held-out loss {:.3f}",
    "eval/accuracy": "held-out accuracy {:.1%}",
    "rollout/num_failed": "failed {:.0f}",
    "tokens/per_second": "{:,.0f} tokens/s",
    "timing/step_s": "{:.1f} s",
}
"""What a line shows, and how."""


class ConsoleTracker:
    """Prints the metrics of `SHOWN`; what is zero and would only matter otherwise stays out."""

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [
            text.format(metrics[name])
            for name, text in SHOWN.items()
            if metrics.get(name) or ("failed" not in text and name in metrics)
        ]
        if parts:
            self._console.print(f"step {step}: {', '.join(parts)}", soft_wrap=True)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """A line has no room for conversations."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Lines are for results."""

    def close(self) -> None:
        """Nothing is held back."""
