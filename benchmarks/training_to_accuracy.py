"""From the same checkpoint to the same held-out accuracy, with rllm and with TRL: CPU-seconds, wall-clock, steps.

    python benchmarks/training_to_accuracy.py [--model FOLDER] [--results FOLDER] [--target 0.9] [--seeds 3]
        [--peer-python PATH] [--json]

The task is to reverse seven digits; the policy has begun to learn it and is right about a third of the time. Each
step trains 16 prompts x 8 on whether the answer is right. Every five steps the same program tests either side's
policy on 256 other questions, which is not counted. Each side tries all learning rates with the first seed, gives up
on one that costs more than the best so far, and repeats the best with the other seeds.

With `--model` both train a pretrained model, SmolLM2's or another whose turns end with `<|im_end|>`, to add two or
three numbers: 8 prompts x 8, answers of up to 48 tokens, 100 other questions, from 4 % to `--target 0.2`.

Each result is appended to a file, and existing ones are not run again. This takes about twenty minutes of CPU, most
of it TRL's; hours with a pretrained model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from against_trl.jobs import Job, Side, has_peer, run_job
from against_trl.model import build_model

LEARNING_RATES = {"short": (2e-4, 4e-4, 1e-4), "sums": (2e-5, 4e-5, 1e-5)}
MOST_STEPS = {"short": 300, "sums": 60}

Result = dict[str, Any]


class Results:
    """Costs of jobs, in a file with one JSON object per line; several processes may append to it."""

    def __init__(self, folder: Path, peer_python: str) -> None:
        self._file = folder / "results.jsonl"
        self._peer_python = peer_python

    def of(self, job: Job) -> Result:
        """Return the costs of a job from the file; otherwise run it."""
        result = self._known(job)
        if result is None:
            result = run_job(job, self._peer_python, on_news=lambda news: report(f"  {news}"))
            with self._file.open("a") as file:
                file.write(json.dumps({"job": _identity(job), "result": result}) + "\n")
        print_result(job, result)
        return result

    def _known(self, job: Job) -> Result | None:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        rows = [json.loads(line) for line in lines]
        return next((row["result"] for row in rows if row["job"] == _identity(job)), None)


def _identity(job: Job) -> dict[str, Any]:
    """Return the parameters that the result depends on; a limit that was not reached has no effect."""
    return {name: value for name, value in asdict(job).items() if name not in ("model", "most_cpu_s")}


def print_result(job: Job, result: Result) -> None:
    end = "reached" if result["reached"] else "not reached"
    accuracies = list(result["accuracies"].values())
    report(
        f"{job.side} lr {job.lr:g} seed {job.seed}: {job.target} {end} after {len(result['cpu_s'])} steps, "
        f"{sum(result['cpu_s']):.0f} CPU-s ({accuracies[0]:.2f} to {max(accuracies):.2f})"
    )


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def best_rate(results: Results, job: Job) -> tuple[float, Result]:
    """Return the learning rate that reaches the target first."""
    best: tuple[float, Result] | None = None
    for lr in LEARNING_RATES[job.workload]:
        limit = sum(best[1]["cpu_s"]) if best else None
        result = results.of(replace(job, lr=lr, most_cpu_s=limit))
        if result["reached"] and (limit is None or sum(result["cpu_s"]) < limit):
            best = lr, result
    if best is None:
        raise SystemExit(f"{job.side} reaches {job.target} with none of {LEARNING_RATES[job.workload]}")
    return best


def measure(results: Results, job: Job, num_seeds: int) -> dict[str, float]:
    """Return the median cost over seeds of reaching the target."""
    lr, first = best_rate(results, job)
    runs = [first, *(results.of(replace(job, lr=lr, seed=seed)) for seed in range(1, num_seeds))]
    return {
        "lr": lr,
        "cpu_s": median(sum(run["cpu_s"]) for run in runs),
        "wall_s": median(sum(run["wall_s"]) for run in runs),
        "steps": median(len(run["cpu_s"]) for run in runs),
        "reached": sum(run["reached"] for run in runs),
        "peak_memory_mb": median(run["peak_memory_mb"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare rllm and TRL from a checkpoint to an accuracy.")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one, made here")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peer-rows", type=int, help="answers in a micro-batch of TRL; default: all answers of a turn")
    parser.add_argument("--target", type=float, help="default: 0.9, or 0.2 for a pretrained model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, default=Path("runs/to-accuracy"), help="folder of checkpoint and results"
    )
    parser.add_argument("--peer-python", default="trl-venv/bin/python", help="Python of an environment with TRL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    workload = "sums" if options.model else "short"
    target = options.target or (0.2 if options.model else 0.9)
    model = options.model or options.results / "checkpoint"
    options.results.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        unfinished = options.results / "unfinished"
        build_model(unfinished, warm=True)
        unfinished.rename(model)
    results = Results(options.results, options.peer_python)
    sides: list[Side] = ["rllm", "TRL"] if has_peer(options.peer_python) else ["rllm"]
    found = {}
    for side in sides:
        job = Job(
            side=side,
            model=str(model.absolute()),
            device=options.device,
            peer_rows=options.peer_rows,
            workload=workload,
            num_steps=MOST_STEPS[workload],
            target=target,
            threads=options.threads,
        )
        found[side] = measure(results, job, options.seeds)
    if options.json:
        print(json.dumps(found))
        return
    for name in found["rllm"]:
        line = "".join(f"   {side} {values[name]:10.4g}" for side, values in found.items())
        print(
            f"{name:16}{line}"
            + (f"   rllm/TRL {found['rllm'][name] / found['TRL'][name]:.2f}" if "TRL" in found else "")
        )


if __name__ == "__main__":
    main()
