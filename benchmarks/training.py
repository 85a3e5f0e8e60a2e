"""A GRPO training step of a small model, with rllm and with TRL: CPU-seconds, tokens per second, wall-clock, peak memory.

    python benchmarks/training.py [WORKLOAD ...] [--model FOLDER] [--device cpu] [--rounds 2] [--steps 3] [--autocast]
        [--peer-python PATH] [--json]

One step is sampling, scoring and update; `against_trl/workloads.py` has the workloads. Both sides train the same
Qwen3 of 3.7 M parameters (random, except for `task`) from the same folder, in float32, with the same number of
threads and the same settings of GRPO and AdamW. They take turns, because other programs may share the machine; the
result is the median step. Gateway and store are measured elsewhere. With `--model` both train a pretrained model
whose turns end with `<|im_end|>`, as SmolLM2's do; `update_share` is our update's speed as a share of the rate at
which the machine multiplies matrices of the model's shapes.

`turns` are conversations of five turns. Ours are sampled turn by turn, and each is trained as one sequence. TRL
trains a prompt and its answer, so it gets the five prompts of each conversation separately, and samples and trains as
many answers of the same lengths after prompts of the same lengths, in one update.

TRL needs its own environment, because it pins other versions:

    python -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0 trl==1.16.0
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from against_trl.jobs import Job, Side, has_peer, run_job
from against_trl.model import build_model
from against_trl.workloads import RANDOM_POLICY, WORKLOADS

SKIPPED = 1
"""First steps of a process to leave out, because they pay for set-up."""


def measure(workload: str, model: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median step of each side."""
    sides: list[Side] = ["rllm", "TRL"] if options.with_peer else ["rllm"]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side in sides:
            job = Job(
                side=side,
                model=model,
                device=options.device,
                peer_rows=options.peer_rows,
                workload=workload,
                num_steps=SKIPPED + options.steps,
                threads=options.threads,
                autocast=options.autocast,
            )
            runs[side].append(run_job(job, options.peer_python))
    return {side: summary(results) for side, results in runs.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    def typical(name: str) -> float:
        return median(value for run in runs for value in run[name][SKIPPED:])

    shares = [share for run in runs for share in run["update_share"][SKIPPED:]]
    tokens = median(run["tokens_per_step"] for run in runs)
    return {
        "cpu_s": typical("cpu_s"),
        "wall_s": typical("wall_s"),
        "tokens_per_cpu_s": tokens / typical("cpu_s"),
        "peak_memory_mb": median(run["peak_memory_mb"] for run in runs),
        **({"update_share": median(shares)} if shares else {}),
    }


def show(workload: str, sides: dict[str, dict[str, float]]) -> None:
    print(f"{workload}: {WORKLOADS[workload].title}")
    for name in sides["rllm"]:
        line = "".join(f"   {side} {values[name]:9.2f}" for side, values in sides.items() if name in values)
        ratio = f"   rllm/TRL {sides['rllm'][name] / sides['TRL'][name]:.3f}" if name in sides.get("TRL", {}) else ""
        print(f"  {name:18}{line}{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a GRPO training step of rllm with one of TRL.")
    parser.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help=f"one of {', '.join(WORKLOADS)}; default: all that suit the model",
    )
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one, made here")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peer-rows", type=int, help="answers in a micro-batch of TRL; default: all answers of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--autocast", action="store_true", help="let both sides' updates multiply in bfloat16")
    parser.add_argument("--peer-python", default="trl-venv/bin/python", help="Python of an environment with TRL")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}: use {', '.join(WORKLOADS)}")
    if options.model and not options.model.is_dir():
        parser.error(f"--model {options.model}: no such folder")
    suitable = [name for name in WORKLOADS if name in RANDOM_POLICY or options.model]
    if unsuitable := set(options.workloads) - set(suitable):
        parser.error(f"{', '.join(sorted(unsuitable))} needs a pretrained policy: set --model")
    options.with_peer = has_peer(options.peer_python)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in options.workloads or suitable:
            model = options.model or Path(folder, "warm" if WORKLOADS[workload].warm else "random")
            if not model.exists():
                build_model(model, warm=WORKLOADS[workload].warm)
            results[workload] = measure(workload, str(model.absolute()), options)
            if not options.json:
                show(workload, results[workload])
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
