"""A GRPO training step of a small model, ours against TRL's: CPU-seconds, wall-clock, tokens per second, peak memory.

    python benchmarks/training.py [--steps 8] [--threads 1] [--peer-python PATH] [--json]

One step is generation, scoring and update for 16 prompts x 8 rollouts: prompts of about 19 tokens, answers of 8. Both sides
train the same random Qwen3 model of 3.7 M parameters from the same folder, in float32, each in a process of its own, with
the same number of threads, learning rate and rewards. Ours reads CPU time around the same work; gateway and store are
measured elsewhere. TRL wants an environment of its own, because it pins other versions:

    python -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0 trl==1.16.0
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

NUM_PROMPTS, GROUP_SIZE, ANSWER_TOKENS, LR = 16, 8, 8, 1e-5
SKIPPED = 2
"""First steps, which pay for set-up, are left out."""


def reward(text: str) -> float:
    """Something that differs between samples: how many of the letters are vowels."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)


def prompts() -> Iterator[str]:
    """Endless prompts: turn these letters round."""
    rng = random.Random(0)
    while True:
        yield f"reverse {''.join(rng.choice('abcdefghij') for _ in range(6))}"


def build_model(folder: Path) -> None:
    """A random Qwen3 with a tokenizer of two thousand words, saved as an ordinary folder."""
    from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer

    rng = random.Random(1)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6))) for _ in range(20_000)]
    tokenizer = train_tokenizer(
        [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)], vocab_size=2048
    )
    recipe = TinyPolicyRecipe(hidden_size=256, num_layers=4, num_heads=8, num_key_value_heads=4, intermediate_size=768)
    new_model(tokenizer, recipe).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_ours(folder: str, steps: int, threads: int) -> dict[str, Any]:
    """Our step: the embedded sampler, assembly, the local backend."""
    import asyncio

    import torch

    from rllm.algorithms.grpo import GRPO
    from rllm.backends.local.backend import LocalBackend
    from rllm.backends.local.optimizer import OptimizerSettings
    from rllm.inference.local.loading import load_model
    from rllm.trainer.assemble import assemble
    from rllm.types import Episode, Step, Trajectory

    torch.set_num_threads(threads)
    backend = LocalBackend(
        load_model(folder, dtype="float32", device="cpu"), OptimizerSettings(lr=LR), max_concurrent=128
    )
    algorithm, source = GRPO(), prompts()

    async def sample(task: int, index: int, prompt: str) -> Episode:
        output = await backend.inference.get_model_response(
            [{"role": "user", "content": prompt}], max_tokens=ANSWER_TOKENS, temperature=1.0
        )
        step = Step(prompt_ids=output.prompt_ids, response_ids=output.completion_ids, logprobs=output.logprobs)
        return Episode(
            task_id=str(task), index=index, trajectories=[Trajectory(steps=[step], reward=reward(output.text))]
        )

    async def roll_out() -> list[Episode]:
        tasks = [next(source) for _ in range(NUM_PROMPTS)]
        return await asyncio.gather(
            *(sample(task, index, prompt) for task, prompt in enumerate(tasks) for index in range(GROUP_SIZE))
        )

    clock = Clock()
    for step in range(steps):
        episodes = asyncio.run(roll_out())
        backend.update(assemble(episodes, algorithm, step=step, temperature=1.0).batch, algorithm)
        backend.publish()
        clock.tick()
    backend.close()
    return clock.summary()


def run_trl(folder: str, steps: int, threads: int) -> dict[str, Any]:
    """TRL's step, by its own trainer."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    clock = Clock()

    class Tick(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    source = prompts()
    rows = [{"prompt": [{"role": "user", "content": next(source)}]} for _ in range(NUM_PROMPTS * steps)]
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=ANSWER_TOKENS,
            max_steps=steps,
            learning_rate=LR,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )

        def rewards(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
            return [reward(completion[0]["content"]) for completion in completions]

        trainer = GRPOTrainer(
            model=folder, reward_funcs=rewards, args=config, train_dataset=Dataset.from_list(rows), callbacks=[Tick()]
        )
        trainer.train()
    return clock.summary()


class Clock:
    """CPU and wall seconds of each step."""

    def __init__(self) -> None:
        self.ticks = [(time.process_time(), time.perf_counter())]

    def tick(self) -> None:
        self.ticks.append((time.process_time(), time.perf_counter()))

    def summary(self) -> dict[str, Any]:
        spans = list(zip(self.ticks, self.ticks[1:], strict=False))[SKIPPED:]
        wall = median(end[1] - start[1] for start, end in spans)
        return {
            "cpu_s": median(end[0] - start[0] for start, end in spans),
            "wall_s": wall,
            "trained_tokens_per_s": NUM_PROMPTS * GROUP_SIZE * ANSWER_TOKENS / wall,
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def side(python: str, name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own."""
    command = [python, __file__, "--side", name, "--model", folder, "--steps", str(options.steps)]
    done = subprocess.run(
        [*command, "--threads", str(options.threads)], capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="A GRPO training step, ours against TRL's.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-python", default="trl-venv/bin/python", help="Python of an environment with TRL")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run = run_ours if options.side == "ours" else run_trl
        print(json.dumps(run(options.model, options.steps, options.threads)))
        return
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        results = {"ours": side(sys.executable, "ours", folder, options)}
        if Path(options.peer_python).exists():
            results["trl"] = side(options.peer_python, "trl", folder, options)
    report(results, as_json=options.json, peer=options.peer_python)


def report(results: dict[str, dict[str, Any]], *, as_json: bool, peer: str) -> None:
    ours, trl = results["ours"], results.get("trl")
    ratios = {name: ours[name] / trl[name] for name in ours} if trl else {}
    if as_json:
        print(json.dumps({**results, "ours_to_trl": ratios}))
        return
    for name, value in ours.items():
        line = f"{name:22s} ours {value:10.2f}"
        print(f"{line}   TRL {trl[name]:10.2f}   ours/TRL {ratios[name]:.2f}" if trl else line)
    if not trl:
        print(f"TRL was not measured: there is no {peer}. The top of this file says how to make it.")


if __name__ == "__main__":
    main()
