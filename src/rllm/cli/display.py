"""What a person sees while a run goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rllm.engine.under_way import UnderWay
from rllm.errors import number
from rllm.tracking.console import (
    PhaseProgress,
    by_role,
    memory,
    outcomes,
    own_metrics,
    phases,
    sample_lines,
)
from rllm.types import Episode

_BARS = " ▁▂▃▄▅▆▇█"
_MAX_STUCK, _MAX_WARNING, _MAX_EVALUATIONS = 3, 100, 6
_ROLLOUT_SHARE = 0.8
"""How much of a step's time its rollouts are taken to be, so that the bar moves evenly."""


_WITH_HISTORY = {"rollout/reward", "eval/reward", "eval/accuracy", "policy/nll", "eval/loss"}
"""Metrics of which more than the last value is shown."""


class LiveDisplay:
    """A tracker for a terminal: progress and time left, reward and its trend, held-out reward and accuracy, where the time goes,
    and rollouts that are under way or stuck. Warnings and sample conversations are printed above it."""

    def __init__(
        self,
        console: Console,
        num_steps: int,
        under_way: Callable[[], UnderWay] = UnderWay,
        *,
        num_done: int = 0,
        log_samples: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            console: a terminal.
            num_steps: of the whole run.
            under_way: returns the rollouts that are being made now.
            num_done: steps of earlier processes of the run.
            log_samples: see `TrainConfig`.
            clock: in seconds.
        """
        self._console = console
        self._num_steps = num_steps
        self._under_way = under_way
        self._log_samples = log_samples
        self._warnings = _Warnings(console)
        self._histories: dict[str, list[tuple[int, float]]] = {}
        self._latest: dict[str, float] = {}
        self._held_out: dict[str, float] = {}
        self._phase = PhaseProgress(clock)
        self._phase.reach("loading the model", 0, 1)
        self._ended = ""
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
        for name in _WITH_HISTORY & metrics.keys():
            self._histories.setdefault(name, []).append((step, metrics[name]))
        is_evaluation = any(name.startswith("eval/") for name in metrics)
        if is_evaluation:
            self._held_out = dict(metrics)
        else:
            self._latest |= metrics
        self._done = step
        self._progress.update(self._task, completed=step)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        for line in sample_lines(step, split, episodes, self._log_samples, self._console.width):
            self._console.print(Text(line))

    def log_rollout(self, phase: str, episode: Episode) -> None:
        self._phase.add(phase, episode)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._phase.reach(phase, done, total)
        if phase == "roll out":
            self._progress.update(self._task, completed=self._done + _ROLLOUT_SHARE * done / max(total, 1))

    def close(self) -> None:
        if not self._live.is_started:
            return
        self._ended = "done" if self._done >= self._num_steps else f"stopped at step {self._done}"
        self._live.refresh()
        self._live.stop()
        logging.getLogger("rllm").removeHandler(self._warnings)

    def _render(self) -> Group:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column()
        for name, value in self._rows():
            if value:
                facts.add_row(name, Text(value) if isinstance(value, str) else value)
        return Group(self._progress, facts)

    def _rows(self) -> Iterator[tuple[str, Text | str]]:
        latest, held_out = self._latest, self._held_out
        if "policy/nll" in self._histories or "eval/loss" in self._histories:
            yield "loss", self._trend("policy/nll")
            yield "held-out loss", self._by_step("eval/loss")
        else:
            yield "reward", self._trend("rollout/reward")
            yield "held-out reward", self._by_step("eval/reward")
            yield "held-out accuracy", self._by_step("eval/accuracy", "{:.0%}")
        yield "rollouts", ", ".join(outcomes(latest, "rollout/"))
        yield "roles", _beside(by_role(latest, "rollout/reward/"), by_role(held_out, "eval/reward/"))
        yield "reported", _beside(own_metrics(latest), own_metrics(held_out, "eval/"))
        speed = [f"{latest['tokens/per_second']:,.0f} tokens/s"] if "tokens/per_second" in latest else []
        yield "speed", ", ".join([*speed, *memory(latest)])
        yield "last step", phases(latest)
        yield "now", self._now()
        if self._warnings.count:
            yield "warnings", Text(f"{self._warnings.count}, the last: {self._warnings.latest}", style="yellow")

    def _trend(self, name: str) -> Text:
        """The last value and the trend of all."""
        values = [value for _, value in self._histories.get(name, ())]
        if not values:
            return Text("-")
        return Text(f"{number(values[-1], decimals=3)}  ").append(trend(values), style="green")

    def _by_step(self, name: str, form: str = "") -> str:
        """The latest values, each with its step."""
        values = self._histories.get(name, [])[-_MAX_EVALUATIONS:]
        shown = ((step, form.format(value) if form else number(value, decimals=3)) for step, value in values)
        return "  ".join(f"{value} (step {step})" for step, value in shown)

    def _now(self) -> str:
        if self._ended:
            return self._ended
        under_way = self._under_way()
        told = [self._phase.in_words()] if self._phase.in_words() else []
        if under_way.num_running:
            told.append(f"{under_way.num_running} running")
        told += [
            f"{label} stuck for {seconds:.0f} s" for label, seconds in list(under_way.stuck().items())[:_MAX_STUCK]
        ]
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


def _beside(training: Sequence[str], held_out: Sequence[str]) -> str:
    """Values of training, and those of the last evaluation behind them."""
    shown = [", ".join(training), f"held out: {', '.join(held_out)}" if held_out else ""]
    return "; ".join(filter(None, shown))


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
