"""Seconds per training step if rollouts run ahead of the updates or alternate with them, for an agent that waits for a tool.

    python benchmarks/overlap.py [--steps 8] [--tool-s 0.3] [--json]

The agent asks the policy, waits for a tool, and asks again; 8 tasks x 8 rollouts a step, a policy of 3.7 million
parameters. All runs do the same work in separate processes: only `rollout.max_staleness` differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from against_trl.model import build_model

SKIPPED = 2
"""First steps to leave out, because they pay for set-up."""
AHEAD = (0, 1, 2)


def train(folder: Path, model: str, max_staleness: int, num_steps: int, tool_s: float) -> float:
    """Return the median seconds per step."""
    from openai import AsyncOpenAI

    from rllm.trainer.agent_trainer import AgentTrainer

    async def agent(question: str, base_url: str) -> float:
        messages = [{"role": "user", "content": question}]
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=32)
                text = answer.choices[0].message.content or ""
                await asyncio.sleep(tool_s)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        return float(len(text) % 2)

    trainer = AgentTrainer(
        agent_run_func=agent,
        train_dataset=[{"question": f"What comes after {number}?"} for number in range(64)],
        config={
            "model": {"path": model},
            "run_dir": str(folder),
            "num_steps": num_steps,
            "tasks_per_step": 8,
            "save_every": 0,
            "trackers": ["jsonl"],
            "rollout": {"group_size": 8, "max_staleness": max_staleness},
        },
    )
    trainer.train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return median([line["timing/step_s"] for line in lines if "timing/step_s" in line][SKIPPED:])


def measured(model: str, max_staleness: int, options: argparse.Namespace) -> float:
    """Run `train` in a separate process."""
    same = ["--steps", str(options.steps), "--tool-s", str(options.tool_s)]
    done = subprocess.run(
        [sys.executable, __file__, "--only", str(max_staleness), "--model", model, *same],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise SystemExit(f"max_staleness={max_staleness} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare rollouts that run ahead of the updates with alternating ones."
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tool-s", type=float, default=0.3, help="how long the agent's tool takes")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(train(Path(folder) / "run", options.model, options.only, options.steps, options.tool_s))
        return
    with tempfile.TemporaryDirectory() as model:
        build_model(Path(model))
        seconds = {ahead: measured(model, ahead, options) for ahead in AHEAD}
    if options.json:
        print(json.dumps({f"max_staleness={ahead}": value for ahead, value in seconds.items()}))
        return
    for ahead, value in seconds.items():
        print(f"max_staleness={ahead}: {value:6.2f} s a step, {value / seconds[0]:.2f} of alternating")


if __name__ == "__main__":
    main()
