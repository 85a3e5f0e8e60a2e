"""Metrics to charts: where lines, bands and points lie. The templates draw them as SVG, which needs no script to be read."""

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
"""Points up to which each is a link of its own; with more the lines are enough, and their steps are listed below."""
_MAX_ON_A_LINE = 420
_GREATEST = 1e300
"""Beyond it nothing can be drawn: what lies between two such values is no number any more."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One metric."""

    metric: str
    label: str
    band: tuple[str, str] | None = None
    """Metrics between which most values lie."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What one chart shows."""

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
        explained="share of rollouts that were right; failed ones count as wrong",
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
        explained="of what each token was drawn from",
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
    """A value of a metric, and where it lies."""

    step: int
    value: float
    x: float
    y: float


@dataclass(kw_only=True)
class Trace:
    """A line as it is drawn."""

    label: str
    style: int
    """Which of the style sheet's strokes."""
    run: str
    points: list[Point]
    path: str
    band: str = ""

    @property
    def last(self) -> float:
        return self.points[-1].value


@dataclass(kw_only=True)
class Chart:
    """A chart, ready to be drawn."""

    panel: Panel
    traces: list[Trace] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def has_links(self) -> bool:
        return sum(len(trace.points) for trace in self.traces) <= MAX_POINTS * max(len(self.traces), 1)


def charts_of(
    runs: Sequence[tuple[str, Sequence[Row]]], *, first: int | None = None, last: int | None = None
) -> list[Chart]:
    """The charts of one run, or of several in the same coordinates; those for which nothing was measured are left out.

    Args:
        runs: the name of each, and its rows.
        first: the first step to show.
        last: the last one.
    """
    steps = [int(row["step"]) for _, rows in runs for row in rows if _is_within(int(row["step"]), first, last)]
    # one for all, to compare by eye
    across = _Axis.of(min(steps, default=0), max(steps, default=1), LEFT, WIDTH - RIGHT)
    charts = (_chart(panel, runs, across, first, last) for panel in PANELS)
    return [chart for chart in charts if chart.traces]


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
        chart.traces.append(
            Trace(label=label, style=3 * run_number + place, run=run, points=points, path=_path(points), band=band)
        )
    return chart


@dataclass(frozen=True)
class _Axis:
    """Values to coordinates."""

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
        """Round numbers, about so many."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(place * step, 12) for place in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return (low - room if low < 0 or low > 2 * room else min(low, 0.0)), high + room


def _within(values: Sequence[tuple[int, float]], first: int | None, last: int | None) -> list[tuple[int, float]]:
    """Return the values of these steps that can be drawn, rounding noise among larger ones, or alone, as 0."""
    shown = [(step, value) for step, value in values if abs(value) < _GREATEST and _is_within(step, first, last)]
    noise = NOISE * max(1.0, *(abs(value) for _, value in shown), 0.0)
    return [(step, 0.0 if abs(value) < noise else value) for step, value in shown]


def _is_within(step: int, first: int | None, last: int | None) -> bool:
    return (first is None or step >= first) and (last is None or step <= last)


def _thinned(values: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most so many that they can be told apart: of each stretch its least and its greatest value, so that no peak is lost."""
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
class Light:
    """Whether the sampler had the weights that it should have had, at one step."""

    step: int
    state: str
    """`ok`, `warn` or `bad`."""
    sign: str
    told: str


def sync_lights(rows: Sequence[Row], *, max_staleness: int, max_gap: float = 0.05) -> list[Light]:
    """One for each training step: weights were published, were as new as promised, and are those that the trainer has."""
    lights: list[Light] = []
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
        told = "; ".join(wrong) or f"in step{'' if gap is None else f', apart by {number(gap)} nats a token'}"
        lights.append(
            Light(
                step=int(row["step"]),
                state=state,
                sign={"ok": "✓", "warn": "!", "bad": "✕"}[state],
                told=f"step {row['step']}, version {version:g}: {told}",
            )
        )
        before = version
    return lights
