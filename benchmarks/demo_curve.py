"""The curve of `rllm demo` as a picture: `docs/demo.svg`.

    for seed in 0 1 2; do rllm demo --model HuggingFaceTB/SmolLM2-135M-Instruct --seed $seed; done
    python benchmarks/demo_curve.py --model HuggingFaceTB/SmolLM2-135M-Instruct runs/demo-*

The left panel has the accuracy of each training step's rollouts, the right one that on held-out tasks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from learning import DOCS, Curve, draw

PICTURE = DOCS / "demo.svg"
STEP = 0.25
"""Unit of the axes, which end at a multiple of it."""


def curve(run: Path, metric: str) -> Curve:
    """Return a metric by step, from the lines that have it."""
    found = {str(line["step"]): line[metric] for line in lines_of(run) if metric in line}
    if not found:
        raise SystemExit(f"{run} is not a run of `rllm demo`: its metrics.jsonl has no {metric}")
    return found


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def minutes(runs: Sequence[Path]) -> float:
    """Return the median time of the runs in training steps and evaluations."""
    parts = ("timing/step_s", "timing/eval_s")
    return median(sum(line.get(part, 0.0) for line in lines_of(run) for part in parts) for run in runs) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curve of `rllm demo`.")
    parser.add_argument("--model", help="name of the pretrained model of the runs")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, such as runs/demo-*")
    options = parser.parse_args()
    panels = {"training tasks": "rollout/accuracy", "held-out tasks": "eval/accuracy"}
    curves = {name: {run.name: curve(run, metric) for run in options.runs} for name, metric in panels.items()}
    most = max(value for runs in curves.values() for values in runs.values() for value in values.values())
    of_model = f" --model {options.model}" if options.model else ""
    seeds = "one seed" if len(options.runs) == 1 else f"{len(options.runs)} seeds; thick: their mean"
    note = f"rllm demo{of_model}: {seeds}, {minutes(options.runs):.0f} minutes."
    title = "Share of right answers, by training steps"
    PICTURE.write_text(draw(curves, title, note, highest=-(-most // STEP) * STEP))


if __name__ == "__main__":
    main()
