"""The learning curves of every algorithm as a picture: `docs/learning.svg`, and its numbers, `docs/learning.json`.

    make test-learning                         # trains, and leaves its curves in runs/learning
    python benchmarks/learning.py runs/learning    # gathers them, and draws
    python benchmarks/learning.py                  # draws what was gathered before

A curve is the mean reward on held-out tasks by number of training steps. `tests/learning` defines the tasks and
settings. `docs/shell_tasks.svg` is drawn too, from the table in the README of `examples/shell_tasks`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

DOCS = Path(__file__).parents[1] / "docs"
SHELL_TASKS, SHELL_PICTURE = DOCS.parent / "examples" / "shell_tasks" / "README.md", DOCS / "shell_tasks.svg"
NUMBERS, PICTURE = DOCS / "learning.json", DOCS / "learning.svg"

Curve: TypeAlias = Mapping[str, float]
"""Mean reward by number of training steps done."""
Curves: TypeAlias = Mapping[str, Mapping[str, Curve]]
"""Curves by algorithm and seed."""

COLUMNS = 4
PANEL_WIDTH, PANEL_HEIGHT = 150, 90
GAP_X, GAP_Y, LEFT, TOP, BOTTOM = 56, 52, 44, 76, 44
INK, ACCENT = "#777c84", "#2f81d8"
"""Colours of medium lightness, which are readable on white and on black."""


def gather(folder: Path) -> Curves:
    """Return the curves of the runs, in order of algorithm and seed."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise SystemExit(f"{folder} holds no curves: run `make test-learning`, which leaves them in runs/learning")
    names = sorted({run["name"] for run in runs})
    return {name: {str(run["seed"]): run["curve"] for run in runs if run["name"] == name} for name in names}


def draw(
    curves: Curves,
    title: str = "Mean reward on held-out tasks, by training steps",
    note: str = "Thin: three seeds. Thick: their mean, with its first and last value.",
    *,
    highest: float = 1.0,
) -> str:
    """Return the picture as SVG: a panel for each algorithm, a thin line for each seed, and a thick one for their mean.

    The axes end at `highest`.
    """
    rows = -(-len(curves) // COLUMNS)
    width = LEFT + max(2, min(len(curves), COLUMNS)) * (PANEL_WIDTH + GAP_X)
    height = TOP + rows * (PANEL_HEIGHT + GAP_Y) - GAP_Y + BOTTOM
    steps = max(int(step) for seeds in curves.values() for curve in seeds.values() for step in curve)
    places = enumerate(curves.items())
    panels = [line for place, (name, seeds) in places for line in _panel(place, name, seeds, steps, highest)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}" role="img">',
            f"<title>{title}</title>",
            _text(LEFT, 20, title, "start", size=14, weight="bold"),
            _text(LEFT, 38, note, "start"),
            *panels,
            "</svg>\n",
        ]
    )


def draw_shell_tasks() -> str:
    """Return the picture of the table of `SHELL_TASKS`, which has a row for each seed and a column for each evaluation."""
    rows = re.findall(r"^\| seed (\d+) ((?:\| \d+ % )+)\|$", SHELL_TASKS.read_text(), re.MULTILINE)
    seeds = {
        seed: {str(6 * place): int(share) / 100 for place, share in enumerate(re.findall(r"\d+", shares))}
        for seed, shares in rows
    }
    title = "Share of held-out shell tasks solved, by training steps"
    return draw({"terminus in bubblewrap": seeds}, title)


def _panel(place: int, name: str, seeds: Mapping[str, Curve], steps: int, highest: float) -> Iterator[str]:
    left = LEFT + place % COLUMNS * (PANEL_WIDTH + GAP_X)
    top = TOP + place // COLUMNS * (PANEL_HEIGHT + GAP_Y)

    def x_of(step: float) -> float:
        return left + PANEL_WIDTH * step / steps

    def y_of(reward: float) -> float:
        return top + PANEL_HEIGHT * (1 - reward / highest)

    def line(curve: Curve, style: str) -> str:
        points = " ".join(f"{x_of(int(step)):.1f},{y_of(reward):.1f}" for step, reward in curve.items())
        return f'<polyline points="{points}" fill="none" stroke="{ACCENT}" {style}/>'

    yield _text(left, top - 10, name, "start", weight="bold")
    for reward in (0.0, highest / 2, highest):
        yield f'<path d="M{left} {y_of(reward):.1f}h{PANEL_WIDTH}" stroke="{INK}" stroke-opacity="0.35"/>'
        yield _text(left - 6, y_of(reward) + 4, f"{reward:g}", "end")
    for step in (0, steps // 2, steps):
        yield _text(x_of(step), top + PANEL_HEIGHT + 15, str(step), "middle")
    for curve in seeds.values():
        yield line(curve, 'stroke-width="1" stroke-opacity="0.6"')
    middle = mean_of(list(seeds.values()))
    yield line(middle, 'stroke-width="2.5" stroke-linejoin="round"')
    first, *_, last = middle.values()
    yield _text(left + 6, y_of(first) + 14, f"{first:.2f}", "start", color=ACCENT, weight="bold")
    yield _text(left + PANEL_WIDTH + 4, y_of(last) + 4, f"{last:.2f}", "start", color=ACCENT, weight="bold")


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Return their mean at each step."""
    return {step: fmean(curve[step] for curve in curves) for step in curves[0]}


def _text(
    x: float, y: float, words: str, anchor: str, *, size: int = 11, color: str = INK, weight: str = "normal"
) -> str:
    style = f'font-size="{size}" fill="{color}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{words}</text>'


def table(curves: Curves) -> Iterator[str]:
    """Return a line for each algorithm, with the first and last value of each seed."""
    for name, seeds in curves.items():
        ends = [list(curve.values()) for curve in seeds.values()]
        yield f"{name:30s}" + "   ".join(f"{values[0]:.2f} -> {values[-1]:.2f}" for values in ends)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the learning curves of every algorithm.")
    parser.add_argument("folder", nargs="?", type=Path, help="gather the curves of this folder first")
    folder = parser.parse_args().folder
    if folder is not None:
        NUMBERS.write_text(json.dumps(gather(folder), indent=1) + "\n")
    curves = json.loads(NUMBERS.read_text())
    PICTURE.write_text(draw(curves))
    SHELL_PICTURE.write_text(draw_shell_tasks())
    print("\n".join(table(curves)))


if __name__ == "__main__":
    main()
