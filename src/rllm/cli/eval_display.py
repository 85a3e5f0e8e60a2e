"""What a person sees of an evaluation: how far it has come, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from rllm.errors import counted
from rllm.tracking.background import Heartbeat
from rllm.tracking.console import QUIET_S, in_words

if TYPE_CHECKING:
    from rllm.engine.failures import Reason
    from rllm.evaluation.compare import Comparison, Difference
    from rllm.evaluation.evaluate import Progress
    from rllm.evaluation.report import Cost, Report, TaskReport

_NUM_SHOWN = 3
"""Reasons that are shown; all of them are in the report's file."""
_MAX_REASON = 400


class EvaluationDisplay:
    """A bar on a terminal; elsewhere a line for every tenth of the way, and one after `QUIET_S` without any."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began_at = self._printed_at = clock()
        self._latest: Progress | None = None
        self._heart = Heartbeat(self.beat, every_s=QUIET_S / 8)
        self._bar = Bar(
            TextColumn("[bold]evaluating"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[counts]}"),
            console=console,
        )
        self._task = self._bar.add_task("evaluating", total=None, counts="")
        self._tenths_said = -1

    def __call__(self, progress: Progress) -> None:
        self._latest = progress
        if self._console.is_interactive:
            self._bar.start()
            self._bar.update(
                self._task, completed=progress.num_done, total=progress.num_planned, counts=_counts(progress)
            )
            return
        tenths = progress.num_done * 10 // progress.num_planned
        if tenths > self._tenths_said:
            self._tenths_said = tenths
            self._print(f"{progress.num_done}/{progress.num_planned} rollouts, {_counts(progress)}")

    def beat(self) -> None:
        """Print how far the evaluation is, if no line was printed for `QUIET_S`."""
        if self._console.is_interactive or self._latest is None or self._clock() - self._printed_at < QUIET_S:
            return
        done, total = self._latest.num_done, self._latest.num_planned
        self._print(f"{done}/{total} rollouts, {_counts(self._latest)}, {in_words(self._clock() - self._began_at)}")

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands. Repeatable."""
        self._heart.close()
        if self._console.is_interactive:  # elsewhere it would print an empty line
            self._bar.stop()


def _counts(progress: Progress) -> str:
    parts = [f"{progress.num_correct} correct"]
    if progress.num_failed:
        parts.append(f"{progress.num_failed} failed")
    if progress.num_kept:
        parts.append(f"{progress.num_kept} from before")
    return ", ".join(parts)


def show_report(console: Console, title: str, report: Report) -> None:
    """The report as a table, and why rollouts failed or were not scored."""
    console.print(f"\n[bold]{escape(title)}[/]", soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    _show_reasons(console, "failed and count as wrong", report.num_failed, report, report.failures)
    _show_reasons(console, "were not scored and are left out", report.num_unscored, report, report.unscored)


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = [("accuracy", str(report.accuracy) if report.accuracy else "- (nothing was scored)")]
    rows += [(f"pass@{k}", str(report.pass_at_k[k])) for k in _shown_ks(report)]
    if report.mean_reward is not None:
        roles = ", ".join(f"{role} {reward:.3f}" for role, reward in report.rewards.items())
        rows.append(("mean reward", f"{report.mean_reward:.3f}" + (f" ({roles})" if len(report.rewards) > 1 else "")))
    rows.append(("tasks", _solved(report.tasks)))
    rows.append(("one rollout", _cost(report.cost)))
    return rows


def _shown_ks(report: Report) -> list[int]:
    """Powers of two, and the largest; the report's file has them all."""
    most = max(report.pass_at_k, default=1)
    return [k for k in report.pass_at_k if k > 1 and (k == most or k & (k - 1) == 0)]


def _solved(tasks: Sequence[TaskReport]) -> str:
    rates = [task.accuracy for task in tasks if task.accuracy is not None]
    always, never = rates.count(1.0), rates.count(0.0)
    sometimes = len(rates) - always - never
    return f"{len(tasks)}: {always} always solved, {sometimes} sometimes, {never} never"


def _cost(cost: Cost) -> str:
    tokens = "tokens unknown (the server names none)"
    if cost.prompt_tokens is not None and cost.sampled_tokens is not None:
        tokens = f"{cost.prompt_tokens:,.0f} prompt + {cost.sampled_tokens:,.0f} sampled tokens"
    calls = "" if cost.num_calls is None else f", {cost.num_calls:.1f} calls"
    seconds = "" if cost.seconds is None else f", {cost.seconds:.2f} s"
    return tokens + calls + seconds


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
    """Print the difference between two evaluations, and what else differs between them."""
    console.print(f"\n[bold]{escape(str(second))} compared with {escape(str(first))}[/]", soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("accuracy", _in_points(comparison.accuracy))
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
        console.print("The 95 % interval of the difference in accuracy includes 0: it may be chance.")


def _in_points(rate: Difference) -> str:
    change = f"{100 * rate.value:+.1f} points [{100 * rate.low:+.1f}, {100 * rate.high:+.1f}]"
    return f"{rate.first:.1%} -> {rate.second:.1%}: {change}"
