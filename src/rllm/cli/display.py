"""Live displays and reports on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from rllm.engine.event_loop import UnderWay
from rllm.errors import counted
from rllm.tracking.console import ConsoleTracker
from rllm.tracking.samples import message_text
from rllm.types import Episode, JSONMapping

if TYPE_CHECKING:
    from rllm.engine.failures import Reason
    from rllm.evaluation.evaluate import Progress
    from rllm.evaluation.folder import Comparison
    from rllm.evaluation.report import Report

_MAX_STUCK = 3
_ROLLOUT_SHARE = 0.8
"""Assumed fraction of a step's time that rollouts take, so that the bar moves evenly."""


def _bar(console: Console, name: str, *more: ProgressColumn) -> Bar:
    columns = (TextColumn(f"[bold]{name}"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, *more, console=console)


class LiveDisplay(ConsoleTracker):
    """Tracker for a terminal: the lines of the console, above a bar, the current phase, and stuck rollouts."""

    def __init__(
        self,
        console: Console,
        run_dir: Path,
        settings: JSONMapping,
        under_way: Callable[[], UnderWay] = UnderWay,
        *,
        num_done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run_dir, console, settings=settings, clock=clock)
        self._under_way = under_way
        self._phase.reach("loading the model", 0, 1)
        self._ended = ""
        self._bar = _bar(console, "training")
        self._task = self._bar.add_task("training", total=self._num_steps, completed=num_done)
        self._done = num_done
        # It prints anything written to stderr meanwhile, such as warnings, above itself.
        self._live = Live(get_renderable=lambda: Group(self._bar, Text(self._now())), console=console)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self._done = step
        self._bar.update(self._task, completed=step)

    def progress(self, phase: str, done: int, total: int) -> None:
        super().progress(phase, done, total)
        if phase == "roll out":
            self._bar.update(self._task, completed=self._done + _ROLLOUT_SHARE * done / max(total, 1))

    def beat(self) -> None:
        """Do nothing: the display itself shows progress."""

    def close(self) -> None:
        super().close()
        if self._live.is_started:
            self._ended = "done" if self._done >= self._num_steps else f"stopped at step {self._done}"
            self._live.refresh()
            self._live.stop()

    def _now(self) -> str:
        if self._ended:
            return self._ended
        under_way = self._under_way()
        running = f"{under_way.num_running} running" if under_way.num_running else ""
        stuck = list(under_way.stuck().items())[:_MAX_STUCK]
        parts = [self._phase.in_words(), running, *(f"{label} stuck for {seconds:.0f} s" for label, seconds in stuck)]
        return "; ".join(filter(None, parts))


def conversation(episode: Episode) -> Group:
    """Format an episode's longest trajectory for reading."""
    steps = max((path.steps for path in episode.trajectories), key=len, default=[])
    messages = steps[-1].chat_completions if steps else []
    lines = [Text.assemble((f"  {message['role']:>9}  ", "bold"), message_text(message)) for message in messages]
    verdict = Text("    correct", style="green") if episode.is_correct else Text("      wrong", style="red")
    return Group(*lines, verdict)


_NUM_SHOWN = 3
"""Number of reasons to show; the report's file has all."""
_MAX_REASON = 400


class EvaluationDisplay:
    """Progress of an evaluation: a bar on a terminal, elsewhere a line for every tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = _bar(console, "evaluating", TextColumn("{task.fields[counts]}"))
        self._task = self._bar.add_task("evaluating", total=None, counts="")
        self._tenths_printed = -1

    def __call__(self, progress: Progress) -> None:
        if self._console.is_interactive:
            self._bar.start()
            self._bar.update(
                self._task, completed=progress.num_done, total=progress.num_planned, counts=_counts(progress)
            )
            return
        tenths = progress.num_done * 10 // progress.num_planned
        if tenths > self._tenths_printed:
            self._tenths_printed = tenths
            done = f"{progress.num_done}/{progress.num_planned} rollouts"
            self._console.print(f"{done}, {_counts(progress)}", soft_wrap=True)

    def close(self) -> None:
        """Stop the bar. Repeatable."""
        if self._console.is_interactive:  # otherwise it would print an empty line
            self._bar.stop()


def _counts(progress: Progress) -> str:
    parts = [f"{progress.num_correct} correct"]
    if progress.num_failed:
        parts.append(f"{progress.num_failed} failed")
    if progress.num_kept:
        parts.append(f"{progress.num_kept} kept")
    return ", ".join(parts)


def show_report(console: Console, title: str, report: Report) -> None:
    """Print the report as a table, and the reasons for failed and unscored rollouts."""
    console.print(f"\n[bold]{escape(title)}[/]", soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _report_rows(report):
        table.add_row(name, value)
    console.print(table)
    _show_reasons(console, "failed and count as wrong", report.num_failed, report, report.failures)
    _show_reasons(console, "were not scored and are left out", report.num_unscored, report, report.unscored)
    num_unknown = sum(reason.count for reason in report.no_tokens)
    _show_reasons(console, "had a call without usable tokens", num_unknown, report, report.no_tokens)


def _report_rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "accuracy", str(report.accuracy) if report.accuracy else "- (nothing was scored)"
    largest = max(report.pass_at_k, default=1)
    for k, estimate in report.pass_at_k.items():
        if k > 1 and (k == largest or k & (k - 1) == 0):  # powers of two; the report's file has all
            yield f"pass@{k}", str(estimate)
    if report.mean_reward is not None:
        roles = ", ".join(f"{role} {reward:.3f}" for role, reward in report.rewards.items())
        yield "mean reward", f"{report.mean_reward:.3f}" + (f" ({roles})" if len(report.rewards) > 1 else "")
    yield from ((escape(name), f"{mean:.3f}") for name, mean in report.metrics.items())
    rates = [task.accuracy for task in report.tasks if task.accuracy is not None]
    always, never = rates.count(1.0), rates.count(0.0)
    sometimes = len(rates) - always - never
    yield "tasks", f"{len(report.tasks)}: {always} always solved, {sometimes} sometimes, {never} never"
    for name, part in report.sources.items():
        reward = "" if part.mean_reward is None else f", mean reward {part.mean_reward:.3f}"
        scored = f"{part.accuracy}{reward}" if part.accuracy else "- (nothing was scored)"
        yield escape(name), f"{scored}, {counted(part.num_tasks, 'task')}"
    cost = report.cost
    parts = [] if cost.num_calls == 0 else ["tokens unknown (not every call has token ids)"]
    if cost.prompt_tokens is not None and cost.sampled_tokens is not None:
        parts = [f"{cost.prompt_tokens:,.0f} prompt + {cost.sampled_tokens:,.0f} sampled tokens"]
    parts += [] if cost.num_calls is None else [f"{cost.num_calls:.1f} calls"]
    parts += [] if cost.seconds is None else [f"{cost.seconds:.2f} s"]
    yield "one rollout", ", ".join(parts)


def _show_reasons(console: Console, what: str, count: int, report: Report, reasons: Sequence[Reason]) -> None:
    if not count:
        return
    console.print(f"\n[yellow]{count} of {report.num_rollouts} rollouts {what}:[/]")
    for reason in reasons[:_NUM_SHOWN]:
        text = str(reason)
        console.print(f"  {escape(text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + ' ...')}")
    if len(reasons) > _NUM_SHOWN:
        console.print(f"  and {counted(len(reasons) - _NUM_SHOWN, 'more kind')}; report.json has them all")


def show_comparison(console: Console, first: Path, second: Path, comparison: Comparison) -> None:
    """Print the difference between two evaluations, and their settings that differ."""
    console.print(f"\n[bold]{escape(str(second))} compared with {escape(str(first))}[/]", soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rate = comparison.accuracy
    change = f"{100 * rate.value:+.1f} points [{100 * rate.low:+.1f}, {100 * rate.high:+.1f}]"
    table.add_row("accuracy", f"{rate.first:.1%} -> {rate.second:.1%}: {change}")
    if (reward := comparison.mean_reward) is not None:
        change = f"{reward.value:+.3f} [{reward.low:+.3f}, {reward.high:+.3f}]"
        table.add_row("mean reward", f"{reward.first:.3f} -> {reward.second:.3f}: {change}")
    same = comparison.num_tasks - comparison.num_better - comparison.num_worse
    counts = f"{comparison.num_better} better, {comparison.num_worse} worse, {same} the same"
    unpaired = f"; {comparison.num_unpaired} scored in one only, left out" if comparison.num_unpaired else ""
    table.add_row("tasks", f"{comparison.num_tasks}: {counts}{unpaired}")
    for name, (one, two) in comparison.changes.items():
        table.add_row(escape(name), escape(f"{one or 'not set'} -> {two or 'not set'}"))
    console.print(table)
    if comparison.accuracy.low <= 0 <= comparison.accuracy.high:
        console.print("The 95 % interval of the difference in accuracy includes 0, so it may be due to chance.")
