"""Metrics of a run while its `metrics.jsonl` grows, and the layout of their charts, which templates draw as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rllm._runtime.files import lines_of
from rllm._runtime.untrusted import parse_json
from rllm.errors import NOISE, ConfigError, number
from rllm.types import JSONMapping, JSONObject

Row: TypeAlias = JSONMapping
"""Metrics of one step, from all its lines."""


def rows_of(path: Path) -> list[Row]:
    """Read the rows of a `metrics.jsonl` by step, in order; none for a file that cannot be read."""
    rows: dict[int, JSONObject] = {}
    with suppress(OSError, ConfigError):
        for line in lines_of(path):
            try:
                found = parse_json(line)
                step = int(found["step"])
                values = found.items()
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                continue  # an incomplete line of a crashed process
            numbers = {name: value for name, value in values if value is None or isinstance(value, int | float)}
            rows.setdefault(step, {}).update({**numbers, "step": step})
    return [rows[step] for step in sorted(rows)]


def series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return the numeric values of a metric by step."""
    return [
        (int(row["step"]), float(row[name]))
        for row in rows
        if isinstance(row.get(name), int | float) and not isinstance(row.get(name), bool)
    ]


def is_trained(row: Row) -> bool:
    """Return whether a row belongs to a training step, not only to an evaluation."""
    return "timing/step_s" in row


def neighbours(steps: Sequence[int], step: int) -> tuple[int | None, int | None]:
    """Return the steps before and after one."""
    before, after = (item for item in steps if item < step), (item for item in steps if item > step)
    return max(before, default=None), min(after, default=None)


WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 20
MAX_POINTS = 90
"""Largest number of points on a line that are links; steps of longer lines are listed below the chart."""
_MAX_ON_A_LINE = 420
_GREATEST = 1e300
"""Largest value to draw: differences of larger ones may overflow."""


@dataclass(frozen=True)
class Panel:
    """Contents of one chart."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Label of each metric."""
    explained: str = ""


PANELS = (
    Panel(
        "Reward",
        "",
        {"rollout/reward": "training", "eval/reward": "held out"},
        "mean of the rollouts' rewards, with the band in which 80 % of them lie",
    ),
    Panel(
        "Accuracy",
        "",
        {"rollout/accuracy": "training", "eval/accuracy": "held out"},
        "fraction of correct rollouts; failed ones count as wrong",
    ),
    Panel("Loss", "", {"policy/loss": "policy", "policy/nll": "demonstrations", "eval/loss": "held out"}),
    Panel("Entropy", "nats", {"policy/entropy": "policy"}, "of the distributions that tokens are sampled from"),
    Panel(
        "KL",
        "nats",
        {
            "policy/kl": "to the reference",
            "policy/update_kl": "of the updates",
            "policy/sampler_kl": "sampler to trainer",
        },
    ),
    Panel("Answer length", "tokens", {"rollout/response_tokens": "mean"}),
    Panel("Calls per rollout", "", {"rollout/calls_per_episode": "calls"}),
    Panel("Drift", "fraction", {"tokens/drift": "prompts that fork", "rollout/truncated": "cut off"}),
    Panel(
        "Sampler and trainer",
        "nats",
        {"policy/sampler_gap_mean": "mean difference", "policy/sampler_gap_max": "maximum"},
        "difference of their log-probabilities of the same tokens",
    ),
    Panel("Nothing to learn", "fraction", {"batch/zero_variance": "groups with equal rewards"}),
    Panel("Gradient", "norm", {"policy/grad_norm": "policy", "critic/grad_norm": "critic"}),
    Panel("Time", "s", {"timing/step_s": "step", "timing/rollout_s": "rollouts", "timing/update_s": "update"}),
)
_BANDS = {"rollout/reward": ("rollout/reward_p10", "rollout/reward_p90")}
"""Metrics that bound most values."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Value of a metric, and its position."""

    step: int
    value: float
    x: float
    y: float


@dataclass(kw_only=True)
class PlottedLine:
    """A drawn line."""

    label: str
    style: int
    """Number of its stroke in the style sheet."""
    run: str
    points: list[Point]
    path: str
    band: str = ""

    @property
    def last(self) -> float:
        return self.points[-1].value


@dataclass(kw_only=True)
class Chart:
    """A chart ready to draw."""

    panel: Panel
    lines: list[PlottedLine] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def has_links(self) -> bool:
        return sum(len(line.points) for line in self.lines) <= MAX_POINTS * max(len(self.lines), 1)


def charts_of(
    runs: Sequence[tuple[str, Sequence[Row]]], *, first: int | None = None, last: int | None = None
) -> list[Chart]:
    """Return the charts of one run, or of several in the same coordinates, without empty ones.

    Args:
        runs: names and rows of the runs.
        first: first step to show.
        last: last step to show.
    """
    steps = [int(row["step"]) for _, rows in runs for row in rows if _is_within(int(row["step"]), first, last)]
    # shared by all charts, for comparison
    across = _Axis.of(min(steps, default=0), max(steps, default=1), LEFT, WIDTH - RIGHT)
    charts = (_chart(panel, runs, across, first, last) for panel in PANELS)
    return [chart for chart in charts if chart.lines]


def _chart(
    panel: Panel, runs: Sequence[tuple[str, Sequence[Row]]], across: _Axis, first: int | None, last: int | None
) -> Chart:
    chart = Chart(panel=panel)
    found = []
    for run_number, (run, rows) in enumerate(runs):
        for place, (metric, label) in enumerate(panel.lines.items()):
            values = _within(series(rows, metric), first, last)
            bands = [_within(series(rows, name), first, last) for name in _BANDS.get(metric, ())]
            if values:
                found.append((run, 3 * run_number + place, label, values, bands))
    numbers = [value for *_, values, bands in found for _, value in itertools.chain(values, *bands)]
    if not numbers:
        return chart
    least, greatest = min(numbers), max(numbers)
    room = 0.06 * (greatest - least) or 0.05 * abs(greatest) or 0.5
    bottom = least - room if least < 0 or least > 2 * room else min(least, 0.0)
    up = _Axis.of(bottom, greatest + room, HEIGHT - BOTTOM, TOP)
    chart.y_ticks = [(up.at(value), number(value)) for value in up.ticks(4)]
    chart.x_ticks = [(across.at(value), f"{value:g}") for value in across.ticks(6) if value == int(value)]
    for run, style, label, values, bands in found:
        points = [Point(step=step, value=value, x=across.at(step), y=up.at(value)) for step, value in _thinned(values)]
        band = ""
        if all(bands) and bands and style < 3:  # of the first run only
            low, high = ([f"{across.at(step)} {up.at(value)}" for step, value in _thinned(bound)] for bound in bands)
            band = f"M{'L'.join([*high, *reversed(low)])}Z"
        path = "M" + "L".join(f"{point.x} {point.y}" for point in points)
        name = label if len(runs) == 1 else f"{run}: {label}"
        chart.lines.append(PlottedLine(label=name, style=style, run=run, points=points, path=path, band=band))
    return chart


@dataclass(frozen=True)
class _Axis:
    """Scale from values to coordinates."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def of(cls, low: float, high: float, start: float, stop: float) -> _Axis:
        return cls(low, high if high > low else low + 1.0, start, stop)

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start), 1)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round numbers."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(place * step, 12) for place in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _within(values: Sequence[tuple[int, float]], first: int | None, last: int | None) -> list[tuple[int, float]]:
    """Return the values of these steps that can be drawn, with rounding noise as 0."""
    shown = [(step, value) for step, value in values if abs(value) < _GREATEST and _is_within(step, first, last)]
    noise = NOISE * max(1.0, *(abs(value) for _, value in shown), 0.0)
    return [(step, 0.0 if abs(value) < noise else value) for step, value in shown]


def _is_within(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)


def _thinned(values: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return at most `_MAX_ON_A_LINE` values: the smallest and the largest of each stretch, so that peaks remain."""
    if len(values) <= _MAX_ON_A_LINE:
        return values
    size = math.ceil(len(values) / (_MAX_ON_A_LINE // 2))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        ends = {min(part, key=lambda pair: pair[1]), max(part, key=lambda pair: pair[1])}
        kept += sorted(ends)
    return kept


@dataclass(frozen=True, kw_only=True)
class SyncStatus:
    """Weight sync of one step: the sampler's weights against those it should have had."""

    step: int
    state: str
    """`ok`, `warn` or `bad`."""
    sign: str
    text: str


def sync_status(rows: Sequence[Row], *, max_staleness: int, max_gap: float = 0.05) -> list[SyncStatus]:
    """Return the status of each training step: weights were published, recent enough, and equal to the trainer's."""
    statuses: list[SyncStatus] = []
    before: float | None = None
    for row in rows:
        version = row.get("policy/weight_version")
        if version is None:
            continue
        stale, gap = row.get("tokens/staleness_max"), row.get("policy/sampler_gap_mean")
        wrong = []
        if before is not None and version != before + 1:
            wrong.append(f"version {version:g} follows {before:g}")
        if stale is not None and stale > max_staleness:
            wrong.append(f"tokens were {stale:g} versions old, and the limit is {max_staleness}")
        is_bad = bool(wrong)
        if gap is not None and gap > max_gap:
            wrong.append(f"sampler and trainer differ by {number(gap)} nats per token")
        state = "bad" if is_bad else "warn" if wrong else "ok"
        text = "; ".join(wrong) or f"in sync{'' if gap is None else f', {number(gap)} nats per token apart'}"
        statuses.append(
            SyncStatus(
                step=int(row["step"]),
                state=state,
                sign={"ok": "✓", "warn": "!", "bad": "✕"}[state],
                text=f"step {row['step']}, version {version:g}: {text}",
            )
        )
        before = version
    return statuses
