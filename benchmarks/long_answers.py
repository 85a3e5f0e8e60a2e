"""Long answers of a pretrained model: time per token and peak memory, by the length of the answers.

    python benchmarks/long_answers.py MODEL [--lengths 512 1024 2048 4096] [--group 8] [--kept 2048] [--threads 1]

A group of answers to one prompt is sampled and trained on, in a separate process for each length. Attention reads all
earlier tokens, so its part of a token's time grows with the position; everything else should stay constant. Layers of
sequences of more than `--kept` tokens are recomputed in the backward pass, as with `optim.micro_batch_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from dataclasses import replace

import torch
from against_trl.ours import roll_out
from against_trl.workloads import WORKLOADS, questions

from rllm.algorithms.grpo import GRPO
from rllm.backends.local.backend import LocalBackend
from rllm.backends.update import update_weights
from rllm.config.schema import OptimConfig
from rllm.inference.local.loading import load_model
from rllm.trainer.credit import assemble

GB = 1e9
"""Bytes of a gigabyte; `ru_maxrss` counts kilobytes."""


def measure(model: str, length: int, group: int, kept: int, threads: int) -> dict[str, float]:
    """Sample and train on one group, and return milliseconds of CPU for each token, and gigabytes."""
    torch.set_num_threads(threads)
    workload = replace(WORKLOADS["fixed"], num_prompts=1, group_size=group, answer_tokens=length)
    settings = OptimConfig(lr=1e-6, micro_batch_tokens=kept)
    backend = LocalBackend(load_model(model, dtype="float32", device="cpu"), settings, max_concurrent=group, seed=0)
    task = next(questions(workload, 0))
    begin = time.process_time()
    episodes = asyncio.run(roll_out(backend, workload, [task]))
    sampled = time.process_time()
    for index, episode in enumerate(episodes):
        episode.trajectories[0].reward = float(index % 2)
    batch = assemble(episodes, GRPO(), step=0, temperature=1.0).batch
    update_weights(backend, batch, GRPO())
    updated = time.process_time()
    backend.close()
    number = group * length
    return {
        "length": length,
        "sampling_ms": 1000 * (sampled - begin) / number,
        "update_ms": 1000 * (updated - sampled) / number,
        "peak_gb": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a pretrained model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--group", type=int, default=8, help="answers to the prompt")
    parser.add_argument("--kept", type=int, default=2048, help="optim.micro_batch_tokens")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for length in options.lengths:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (options.model, length, options.group, options.kept, options.threads))
        print(json.dumps({name: round(value, 5) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
