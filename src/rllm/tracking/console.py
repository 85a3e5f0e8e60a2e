"""A plain line for each training step, for terminals and log files alike."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from rllm.files import from_here
from rllm.tracking.about import about_run
from rllm.tracking.printed import LastingConsole
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


PHASES = {"rollout": "rollouts", "assemble": "batch", "update": "update", "publish": "publish", "eval": "evaluation"}
"""What a step's time goes into, as `timing/<name>_s`, and how it is called."""
_MEAN_OF = 10
"""Steps that a reward is compared with."""


class ConsoleTracker:
    """Prints where the run is, and then the metrics of `SHOWN`, the reward's trend, where the time goes and how much is left;
    what is zero and would only matter otherwise stays out."""

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self._console = console or LastingConsole(sys.stderr)
        self._num_steps = int(about_run(run_dir).settings.get("num_steps") or 0)
        self._rewards: deque[float] = deque(maxlen=_MEAN_OF)
        self._seconds: deque[float] = deque(maxlen=_MEAN_OF)
        self._console.print(f"Run folder: {from_here(run_dir)}", soft_wrap=True, markup=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [
            text.format(metrics[name]) + (self._trend(metrics[name]) if name == "rollout/reward" else "")
            for name, text in SHOWN.items()
            if metrics.get(name) or ("failed" not in text and name in metrics)
        ]
        if "timing/step_s" in metrics:
            parts[-1] += f" ({phases(metrics)})" if phases(metrics) else ""
            self._seconds.append(metrics["timing/step_s"])
            if self._num_steps > step:
                parts.append(f"{in_words(fmean(self._seconds) * (self._num_steps - step))} left")
        if parts:
            self._console.print(f"step {step}: {', '.join(parts)}", soft_wrap=True)

    def _trend(self, reward: float) -> str:
        before = list(self._rewards)
        self._rewards.append(reward)
        return f" ({reward - fmean(before):+.3f} against the last {len(before)} steps)" if len(before) > 1 else ""

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """A line has no room for conversations."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Lines are for results."""

    def close(self) -> None:
        """Nothing is held back."""


def phases(metrics: Mapping[str, float]) -> str:
    """Where the time of a step went: what took at least a tenth of a second."""
    told = {name: metrics.get(f"timing/{key}_s", 0.0) for key, name in PHASES.items()}
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in told.items() if seconds >= 0.1)


def in_words(seconds: float) -> str:
    """A length of time, as people say it."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
