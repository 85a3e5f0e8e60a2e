"""Layout of charts: lines, bands and points of metrics. Templates draw them as SVG, without scripts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rllm.errors import NOISE, number
from rllm.viewer.metrics import Row, series

WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 20
MAX_POINTS = 90
"""Largest number of points on a line that are links; steps of longer lines are listed below the chart."""
_MAX_ON_A_LINE = 420
_GREATEST = 1e300
"""Largest value to draw: differences of larger ones may overflow."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Metric of a chart."""

    metric: str
    label: str
    band: tuple[str, str] | None = None
    """Metrics that bound most values."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Contents of one chart."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    explained: str = ""


PANELS = (
    Panel(
        title="Reward",
        unit="",
        lines=(
            Line(metric="rollout/reward", label="training", band=("rollout/reward_p10", "rollout/reward_p90")),
            Line(metric="eval/reward", label="held out"),
        ),
        explained="mean of the rollouts' rewards, with the band in which four fifths of them lie",
    ),
    Panel(
        title="Accuracy",
        unit="",
        lines=(Line(metric="rollout/accuracy", label="training"), Line(metric="eval/accuracy", label="held out")),
        explained="share of correct rollouts; failed ones count as wrong",
    ),
    Panel(
        title="Loss",
        unit="",
        lines=(
            Line(metric="policy/loss", label="policy"),
            Line(metric="policy/nll", label="demonstrations"),
            Line(metric="eval/loss", label="held out"),
        ),
    ),
    Panel(
        title="Entropy",
        unit="nats",
        lines=(Line(metric="policy/entropy", label="policy"),),
        explained="of the distributions that tokens are sampled from",
    ),
    Panel(
        title="KL",
        unit="nats",
        lines=(
            Line(metric="policy/kl", label="to the reference"),
            Line(metric="policy/update_kl", label="of the updates"),
            Line(metric="policy/sampler_kl", label="sampler to trainer"),
        ),
    ),
    Panel(title="Answer length", unit="tokens", lines=(Line(metric="rollout/response_tokens", label="mean"),)),
    Panel(title="Calls per rollout", unit="", lines=(Line(metric="rollout/calls_per_episode", label="calls"),)),
    Panel(
        title="Drift",
        unit="share",
        lines=(
            Line(metric="tokens/drift", label="prompts that fork"),
            Line(metric="rollout/truncated", label="cut off"),
        ),
    ),
    Panel(
        title="Sampler and trainer",
        unit="nats",
        lines=(
            Line(metric="policy/sampler_gap_mean", label="mean difference"),
            Line(metric="policy/sampler_gap_max", label="greatest"),
        ),
        explained="how much their log-probabilities of the same tokens differ",
    ),
    Panel(
        title="Nothing to learn",
        unit="share",
        lines=(Line(metric="batch/zero_variance", label="groups that earned the same"),),
    ),
    Panel(
        title="Gradient",
        unit="norm",
        lines=(Line(metric="policy/grad_norm", label="policy"), Line(metric="critic/grad_norm", label="critic")),
    ),
    Panel(
        title="Time",
        unit="s",
        lines=(
            Line(metric="timing/step_s", label="step"),
            Line(metric="timing/rollout_s", label="rollouts"),
            Line(metric="timing/update_s", label="update"),
        ),
    ),
)


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
        for place, line in enumerate(panel.lines):
            values = _within(series(rows, line.metric), first, last)
            bands = [_within(series(rows, name), first, last) for name in line.band or ()]
            if values:
                found.append((run, run_number, place, line, values, bands))
    numbers = [value for *_, values, bands in found for _, value in itertools.chain(values, *bands)]
    if not numbers:
        return chart
    up = _Axis.of(*_padded(min(numbers), max(numbers)), HEIGHT - BOTTOM, TOP)
    chart.y_ticks = [(up.at(value), number(value)) for value in up.ticks(4)]
    chart.x_ticks = [(across.at(value), f"{value:g}") for value in across.ticks(6) if value == int(value)]
    for run, run_number, place, line, values, bands in found:
        points = [Point(step=step, value=value, x=across.at(step), y=up.at(value)) for step, value in _thinned(values)]
        band = _area(across, up, bands[0], bands[1]) if len(bands) == 2 and all(bands) and run_number == 0 else ""
        label = line.label if len(runs) == 1 else f"{run}: {line.label}"
        chart.lines.append(
            PlottedLine(
                label=label, style=3 * run_number + place, run=run, points=points, path=_path(points), band=band
            )
        )
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


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return (low - room if low < 0 or low > 2 * room else min(low, 0.0)), high + room


def _within(values: Sequence[tuple[int, float]], first: int | None, last: int | None) -> list[tuple[int, float]]:
    """Return the values of these steps that can be drawn, with rounding noise as 0."""
    shown = [(step, value) for step, value in values if abs(value) < _GREATEST and _is_within(step, first, last)]
    noise = NOISE * max(1.0, *(abs(value) for _, value in shown), 0.0)
    return [(step, 0.0 if abs(value) < noise else value) for step, value in shown]


def _is_within(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)


def _thinned(values: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return at most `_MAX_ON_A_LINE` values: the least and the greatest of each stretch, so that peaks remain."""
    if len(values) <= _MAX_ON_A_LINE:
        return values
    size = math.ceil(len(values) / (_MAX_ON_A_LINE // 2))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        ends = {min(part, key=lambda pair: pair[1]), max(part, key=lambda pair: pair[1])}
        kept += sorted(ends)
    return kept


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{point.x} {point.y}" for point in points)


def _area(across: _Axis, up: _Axis, low: Sequence[tuple[int, float]], high: Sequence[tuple[int, float]]) -> str:
    there = [f"{across.at(step)} {up.at(value)}" for step, value in _thinned(high)]
    back = [f"{across.at(step)} {up.at(value)}" for step, value in reversed(_thinned(low))]
    return f"M{'L'.join([*there, *back])}Z"


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
            wrong.append(f"tokens were {stale:g} versions old, and {max_staleness} is the limit")
        is_bad = bool(wrong)
        if gap is not None and gap > max_gap:
            wrong.append(f"sampler and trainer differ by {number(gap)} nats a token")
        state = "bad" if is_bad else "warn" if wrong else "ok"
        text = "; ".join(wrong) or f"in step{'' if gap is None else f', apart by {number(gap)} nats a token'}"
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
