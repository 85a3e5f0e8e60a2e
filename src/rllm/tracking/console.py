"""Progress of a run as lines: one for each step and evaluation, sample conversations, and signs of life."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Literal, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rllm._runtime.files import from_here
from rllm._runtime.untrusted import shown
from rllm.errors import number, signed
from rllm.tracking.about import settings_of
from rllm.tracking.base import RECORD_FILE, last_step
from rllm.tracking.samples import excerpts
from rllm.types import Episode, JSONMapping

QUIET_S = 20.0
"""Longest time without a line while a run is working."""
PHASES = {"rollout": "rollouts", "assemble": "batch", "update": "update", "publish": "publish", "eval": "evaluation"}
"""Phases of a step, timed as `timing/<key>_s`, with their names for people."""
_PROGRESS = {"roll out": "rollouts", "evaluate": "evaluation", "assemble": "batch", "save": "checkpoint"}
"""Names for people of the phases of `progress`, where they differ."""
_OURS = {
    *("batch", "critic", "dropped", "eval", "memory", "optim", "policy", "rollout", "sft", "signal"),
    *("timing", "tokens", "val"),
}
"""Groups of metrics that the trainer measures; agents and rewards report all others."""
_MEAN_OF = 10
"""Number of earlier steps whose mean a reward is compared with."""
_MAX_OWN = 6
"""User-defined metrics that a line shows."""
_WIDTH = 120
"""Length of lines without a terminal."""


class LastingConsole(Console):
    """Console on one stream, whatever agents assign to `sys.stdout` and `sys.stderr`.

    Once the reader of the stream has gone, as `head` does, and `tee` at Ctrl-C, nothing more is printed; rich itself
    would end the program. Escape sequences in a text are shown, not interpreted by the terminal.
    """

    def __init__(self, stream: TextIO, *, color_system: Literal["auto"] | None = "auto") -> None:
        super().__init__(file=stream, highlight=False, color_system=color_system)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else Segment(shown(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # the stream is not a file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())  # for other writers of the stream
            os.close(nowhere)


class ConsoleTracker:
    """Tracker that prints the run's folder, then a line for each step and evaluation.

    A line has rewards, problems, timings and the time left; counts of problems are left out while they are zero.
    During a phase longer than `QUIET_S`, progress is printed.
    """

    def __init__(
        self,
        run_dir: Path,
        console: Console | None = None,
        *,
        settings: JSONMapping | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print lines for a run; `settings` are by default those in its folder."""
        settings = settings_of(run_dir) if settings is None else settings
        self._console = console or LastingConsole(sys.stderr)
        self._num_steps = int(settings.get("num_steps") or 0)
        self._log_samples = int(settings.get("log_samples", 2))
        self._rewards: deque[float] = deque(maxlen=_MEAN_OF)
        self._seconds: deque[float] = deque(maxlen=_MEAN_OF)
        self._held_out: dict[str, float] = {}
        self._clock = clock
        self._phase = PhaseProgress(clock)
        self._step = last_step(run_dir / RECORD_FILE)
        self._printed_at = clock()
        self._is_closed = threading.Event()
        self._heart = threading.Thread(target=self._beat_until_closed, name="rllm heartbeat", daemon=True)
        self._heart.start()
        self._print(f"Run folder: {from_here(run_dir)}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if held_out:
            seconds = {name: metrics[name] for name in ("timing/eval_s",) if name in metrics}
            self._print_step(step, ", held out", self._evaluation({**held_out, **seconds}))
        if len(held_out) < len(metrics):
            self._print_step(step, "", self._training(step, metrics))
        self._phase.end()

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        # The evaluation before training, the first step, and every tenth.
        if step == 0 if split == "eval" else step == 1 or step % 10 == 0:
            for line in excerpts(episodes, self._log_samples, width=self._width):
                self._print(line)

    def log_rollout(self, phase: str, episode: Episode) -> None:
        self._phase.add(phase, episode)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._phase.reach(phase, done, total)

    def beat(self) -> None:
        """Print the progress of the current phase, if nothing was printed for `QUIET_S`."""
        text = self._phase.in_words()
        if text and self._clock() - max(self._printed_at, self._phase.began_at) >= QUIET_S:
            self._print_step(self._step + (not self._phase.is_of_last_step), "", [text])

    def close(self) -> None:
        self._is_closed.set()
        self._heart.join()

    def _beat_until_closed(self) -> None:
        with suppress(Exception):  # a missing line is not a reason to end a run
            while not self._is_closed.wait(QUIET_S / 8):
                self.beat()

    def _training(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the parts of a training step's line."""
        parts = []
        if (reward := metrics.get("rollout/reward")) is not None:
            before = fmean(self._rewards) if len(self._rewards) > 1 else None
            parts.append(f"reward {_changed(reward, before)}")
            self._rewards.append(reward)
        words = {"policy/nll": "loss", "policy/teacher_kl": "divergence from the teacher"}
        parts += [f"{word} {number(metrics[name], decimals=3)}" for name, word in words.items() if name in metrics]
        parts += outcomes(metrics, "rollout/")
        if "tokens/per_second" in metrics:
            parts.append(f"{metrics['tokens/per_second']:,.0f} tokens/s")
        if (seconds := metrics.get("timing/step_s")) is not None:
            self._seconds.append(seconds)
            parts.append(f"{seconds:.1f} s" + (f" ({phases(metrics)})" if phases(metrics) else ""))
            if self._num_steps > step:
                parts.append(f"{in_words(fmean(self._seconds) * (self._num_steps - step))} left")
        return [*parts, *memory(metrics), *by_role(metrics, "rollout/reward/"), *own_metrics(metrics)]

    def _evaluation(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the parts of an evaluation's line, compared with the evaluation before."""
        before, self._held_out = self._held_out, dict(metrics)
        shown = {"eval/reward": "reward", "eval/loss": "loss"}
        parts = [
            f"{word} {_changed(metrics[name], before.get(name))}" for name, word in shown.items() if name in metrics
        ]
        parts += outcomes(metrics, "eval/")
        if "timing/eval_s" in metrics:
            parts.append(f"{metrics['timing/eval_s']:.1f} s")
        return [*parts, *by_role(metrics, "eval/reward/"), *own_metrics(metrics, "eval/")]

    def _print_step(self, step: int, which: str, parts: Sequence[str]) -> None:
        of = f"/{self._num_steps}" if self._num_steps else ""
        if parts:
            line = f"step {step}{of}{which}: {', '.join(parts)}"
            wrapper = textwrap.TextWrapper(
                self._width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
            )
            self._print(wrapper.fill(line))

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        self._console.print(Text(text), soft_wrap=True)

    @property
    def _width(self) -> int:
        return self._console.width if self._console.is_terminal else _WIDTH


class PhaseProgress:
    """Progress of the current phase of a run: finished rollouts, their tokens and rewards, and the time taken."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = ""
        self._done = self._total = 0
        self._num_tokens: dict[str, int] = {}
        self._rewards: dict[str, list[float]] = {}
        self.began_at = clock()

    @property
    def is_of_last_step(self) -> bool:
        """True if the phase belongs to the step that was logged last, not to the one after it."""
        return self._name in ("evaluate", "save")

    def reach(self, phase: str, done: int, total: int) -> None:
        """Record a call of `Tracker.progress`."""
        if done == 0:
            self.began_at = self._clock()
            self._num_tokens[phase], self._rewards[phase] = 0, []
        self._name, self._done, self._total = phase, done, total

    def add(self, phase: str, episode: Episode) -> None:
        """Count a finished rollout."""
        steps = [step for path in episode.trajectories for step in path.steps]
        rewards = [] if episode.failed else [path.final_reward() for path in episode.trajectories]
        self._num_tokens[phase] = self._num_tokens.get(phase, 0) + sum(len(step.response_ids) for step in steps)
        self._rewards.setdefault(phase, []).extend(reward for reward in rewards if reward is not None)

    def end(self) -> None:
        """End the phase; nothing is under way until the next one begins."""
        self._name = ""

    def in_words(self) -> str:
        """Return `rollouts 37/128, 12,345 tokens, reward 0.430 so far, 40 s`; nothing between phases."""
        if not self._name:
            return ""
        name = _PROGRESS.get(self._name, self._name)
        parts = [f"{name} {self._done}/{self._total}" if self._total > 1 else name]
        if tokens := self._num_tokens.get(self._name):
            parts.append(f"{tokens:,} tokens")
        if rewards := self._rewards.get(self._name):
            parts.append(f"reward {number(fmean(rewards), decimals=3)} so far")
        return ", ".join([*parts, in_words(self._clock() - self.began_at)])


def outcomes(metrics: Mapping[str, float], group: str) -> list[str]:
    """Return accuracy and problems: truncated answers, failed and unscored rollouts."""
    parts = [f"accuracy {metrics[f'{group}accuracy']:.1%}"] if f"{group}accuracy" in metrics else []
    if cut := metrics.get(f"{group}truncated"):
        parts.append(f"cut {cut:.0%}" if cut >= 0.005 else "cut <1%")
    bad = {"failed": metrics.get(f"{group}num_failed"), "unscored": metrics.get(f"{group}num_unscored")}
    return [*parts, *(f"{word} {count:.0f}" for word, count in bad.items() if count)]


def by_role(metrics: Mapping[str, float], group: str) -> list[str]:
    """Return the mean reward of each role, if there are several."""
    roles = [name for name in metrics if name.startswith(group) and not name.endswith(("_p10", "_p90"))]
    return [f"{name.removeprefix(group)} {number(metrics[name], decimals=3)}" for name in roles]


def own_metrics(metrics: Mapping[str, float], group: str = "") -> list[str]:
    """Return metrics that agents and rewards report, of training or, with `eval/`, of an evaluation."""
    names = [name.removeprefix(group) for name in metrics if name.startswith(group)]
    ours = {*_OURS, "reward"} if group else _OURS  # `reward/...` are the rewards of roles
    own = sorted(name for name in names if "/" in name and name.partition("/")[0] not in ours)
    shown = [f"{name.removeprefix('agent/')} {number(metrics[group + name])}" for name in own[:_MAX_OWN]]
    return [*shown, *([f"and {len(own) - _MAX_OWN} more in metrics.jsonl"] if len(own) > _MAX_OWN else [])]


def memory(metrics: Mapping[str, float]) -> list[str]:
    """Return peak memory of the process and its GPU."""
    names = {"memory/peak_gb": "memory", "memory/gpu_peak_gb": "GPU memory"}
    return [f"{word} {metrics[name]:.1f} GB" for name, word in names.items() if name in metrics]


def phases(metrics: Mapping[str, float]) -> str:
    """Return the phases of a step that took at least a tenth of a second."""
    taken = {name: metrics.get(f"timing/{key}_s", 0.0) for key, name in PHASES.items()}
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in taken.items() if seconds >= 0.1)


def in_words(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _changed(value: float, before: float | None) -> str:
    change = "" if before is None else f" ({signed(value - before, decimals=3)})"
    return f"{number(value, decimals=3)}{change}"
