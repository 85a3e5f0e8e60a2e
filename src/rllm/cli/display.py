"""What a person sees while a run goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rllm.engine.under_way import UnderWay
from rllm.errors import counted
from rllm.tracking.console import phases
from rllm.types import Episode

_BARS = " ▁▂▃▄▅▆▇█"
_MAX_STUCK, _MAX_WARNING = 3, 100
_ROLLOUT_SHARE = 0.8
"""How much of a step's time its rollouts are taken to be, so that the bar moves evenly."""


class LiveDisplay:
    """A tracker for a terminal: progress and time left, reward and its trend, held-out accuracy, where the time goes, and
    rollouts that are under way or stuck. Warnings are printed above it."""

    def __init__(
        self, console: Console, num_steps: int, under_way: Callable[[], UnderWay] = UnderWay, *, num_done: int = 0
    ) -> None:
        """`under_way` tells the rollouts that are being made now; `num_done` are the steps of earlier processes of the run."""
        self._num_steps = num_steps
        self._under_way = under_way
        self._warnings = _Warnings(console)
        self._rewards: list[float] = []
        self._losses: list[float] = []
        self._held_out_losses: list[tuple[int, float]] = []
        self._accuracies: list[tuple[int, float]] = []
        self._latest: dict[str, float] = {}
        self._phase = "loading the model"
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=num_steps, completed=num_done)
        self._done = num_done
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=False)
        logging.getLogger("rllm").addHandler(self._warnings)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest.update(metrics)
        if "rollout/reward" in metrics:
            self._rewards.append(metrics["rollout/reward"])
        if "policy/nll" in metrics:
            self._losses.append(metrics["policy/nll"])
        if "eval/loss" in metrics:
            self._held_out_losses.append((step, metrics["eval/loss"]))
        if "eval/accuracy" in metrics:
            self._accuracies.append((step, metrics["eval/accuracy"]))
        self._done = step
        self._progress.update(self._task, completed=step)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """The display shows numbers."""

    def progress(self, phase: str, done: int, total: int) -> None:
        self._phase = f"{phase} {done}/{total}" if total > 1 else phase
        if phase == "roll out":
            self._progress.update(self._task, completed=self._done + _ROLLOUT_SHARE * done / max(total, 1))

    def close(self) -> None:
        if not self._live.is_started:
            return
        self._phase = "done" if self._done >= self._num_steps else f"stopped at step {self._done}"
        self._live.refresh()
        self._live.stop()
        logging.getLogger("rllm").removeHandler(self._warnings)

    def _render(self) -> Group:
        facts = Table.grid(padding=(0, 2))
        if self._losses or self._held_out_losses:
            facts.add_row("loss", _latest_of(self._losses))
            facts.add_row("held-out loss", _by_step(self._held_out_losses, "{:.3f}"))
        else:
            facts.add_row("reward", _latest_of(self._rewards))
            facts.add_row("held-out accuracy", _by_step(self._accuracies, "{:.0%}"))
        facts.add_row("speed", f"{self._latest.get('tokens/per_second', 0):,.0f} tokens/s")
        facts.add_row("last step", phases(self._latest) or "-")
        facts.add_row("now", Text(self._now()))
        if self._warnings.count:
            facts.add_row(
                "warnings", Text(f"{self._warnings.count}, the last: {self._warnings.latest}", style="yellow")
            )
        return Group(self._progress, facts)

    def _now(self) -> str:
        under_way = self._under_way()
        told = [self._phase]
        if under_way.num_running:
            told.append(f"{under_way.num_running} running")
        told += [
            f"{label} stuck for {seconds:.0f} s" for label, seconds in list(under_way.stuck().items())[:_MAX_STUCK]
        ]
        if failed := int(self._latest.get("rollout/num_failed", 0)):
            told.append(f"{counted(failed, 'rollout')} of the last step failed")
        return "; ".join(told)


class _Warnings(logging.Handler):
    """Counts the warnings of this project, and prints them where nobody else would."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self.count = 0
        self.latest = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self.count += 1
        self.latest = message.partition("\n")[0][:_MAX_WARNING]
        if not logging.getLogger().handlers:
            self._console.print(Text(message, style="yellow"))


def _latest_of(values: Sequence[float]) -> Text:
    """The last value and the trend of all."""
    return Text(f"{values[-1]:.3f}  ").append(trend(values), style="green") if values else Text("-")


def _by_step(values: Sequence[tuple[int, float]], form: str) -> str:
    """The latest values, each with its step."""
    return "  ".join(f"{form.format(value)} (step {step})" for step, value in values[-6:]) or "-"


def trend(values: Sequence[float], width: int = 40) -> str:
    """The latest values as a line of bars, the lowest of them the shortest; where one is no finite number there is a gap."""
    shown = list(values)[-width:]
    finite = list(filter(math.isfinite, shown))
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    heights = (1 + round((value - low) / span * (len(_BARS) - 2)) if math.isfinite(value) else 0 for value in shown)
    return "".join(_BARS[height] for height in heights)


def conversation(episode: Episode) -> Group:
    """An episode's longest trajectory, readable."""
    steps = max((path.steps for path in episode.trajectories), key=len, default=[])
    messages = steps[-1].chat_completions if steps else []
    lines = [Text.assemble((f"  {message['role']:>9}  ", "bold"), _said(message)) for message in messages]
    verdict = Text(
        "      right" if episode.is_correct else "      wrong", style="green" if episode.is_correct else "red"
    )
    return Group(*lines, verdict)


def _said(message: Mapping[str, Any]) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    return " ".join([*filter(None, [str(message.get("content") or "").strip()]), *calls])
