"""The curve of `rllm demo` as a picture, `docs/demo.svg`.

    rllm demo --seed 0; rllm demo --seed 1; rllm demo --seed 2
    python benchmarks/demo_curve.py runs/demo-*

On the left the share of right answers among each training step's rollouts, on the right that on held-out tasks, before and after.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from learning import DOCS, Curve, draw

PICTURE = DOCS / "demo.svg"


def curve(run: Path, metric: str) -> Curve:
    """A metric by step, of the lines that have it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {str(line["step"]): line[metric] for line in lines if metric in line}
    if not found:
        raise SystemExit(f"{run} is no run of `rllm demo`: its metrics.jsonl has no {metric}")
    return found


def main() -> None:
    runs = [Path(name) for name in sys.argv[1:]]
    if not runs:
        raise SystemExit("name the folders of runs: python benchmarks/demo_curve.py runs/demo-*")
    panels = {"training tasks": "rollout/accuracy", "held-out tasks": "eval/accuracy"}
    curves = {name: {run.name: curve(run, metric) for run in runs} for name, metric in panels.items()}
    note = f"rllm demo, {len(runs)} seeds. Thick: their mean, with its first and last value."
    PICTURE.write_text(draw(curves, "Share of right answers, by training steps", note))


if __name__ == "__main__":
    main()
