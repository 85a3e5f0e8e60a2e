"""Sampled tokens per second of the embedded sampler, against `transformers`' own `generate`.

    python benchmarks/sampler.py [--json] [--threads 1] [--dtype float32]

Both sample with the same random Qwen3 model of 3.7 M parameters: prompts of 32-96 tokens, 64 new tokens, no early end.
The sampler also returns log-probabilities; `generate` does not. The last rows show what only the sampler can do: answers of
different lengths through 32 slots, and groups of 8 answers to one prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rllm.inference.local import LocalEngine
from rllm.inference.local.loading import choose_device, choose_dtype

VOCABULARY = 2048
NEW_TOKENS = 64
REPEATS = 4
BATCHES = (1, 8, 32, 64)

Workload = tuple[list[list[int]], list[int]]
"""Prompts, and how many tokens to sample for each."""
Run = Callable[[list[list[int]], list[int]], int]


def build_model(dtype: torch.dtype, device: torch.device) -> Any:
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
    return Qwen3ForCausalLM(config).to(device, dtype).eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Only its ids are used."""
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer


def random_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCABULARY) for _ in range(rng.randint(32, 96))] for _ in range(count)]


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
        padded, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    assert out.shape[1] - longest == max(lengths)
    return sum(lengths)


def compare(runs: dict[str, Run], make: Callable[[int], Workload]) -> dict[str, dict[str, float]]:
    """The best of a few repeats of each, taken in turns because other programs may share the machine; tokens per second of
    wall and of CPU time."""
    best = {name: {"wall": 0.0, "cpu": 0.0} for name in runs}
    for seed in range(-1, REPEATS):
        workload = make(seed)
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = run(*workload)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if seed >= 0:  # the first round warms up
                best[name]["wall"] = max(best[name]["wall"], tokens / wall)
                best[name]["cpu"] = max(best[name]["cpu"], tokens / cpu)
    return best


def workloads() -> dict[str, Callable[[int], Workload]]:
    def equal(count: int) -> Callable[[int], Workload]:
        return lambda seed: (random_prompts(count, seed), [NEW_TOKENS] * count)

    def ragged(seed: int) -> Workload:
        rng = random.Random(seed)
        return random_prompts(128, seed), [rng.randint(8, 128) for _ in range(128)]

    def groups(seed: int) -> Workload:
        return [prompt for prompt in random_prompts(4, seed) for _ in range(8)], [NEW_TOKENS] * 32

    return {
        **{f"{count} sequences": equal(count) for count in BATCHES},
        "128 ragged, 32 slots": ragged,
        "4 groups of 8": groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: CPU-seconds compare best)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    model = build_model(choose_dtype(options.dtype, device), device)
    tokenizer = build_tokenizer()
    results = {}
    for name, make in workloads().items():
        engine = LocalEngine(model, tokenizer, max_concurrent=32 if "slots" in name else 64)

        def sampler(prompts: list[list[int]], lengths: list[int], engine: LocalEngine = engine) -> int:
            return asyncio.run(sample_all(engine, prompts, lengths))

        best = compare({"sampler": sampler, "generate": partial(generate_all, model)}, make)
        engine.close()
        ours, theirs = best["sampler"], best["generate"]
        results[name] = {
            "rllm_tokens_per_s": ours["wall"],
            "rllm_tokens_per_cpu_s": ours["cpu"],
            "generate_tokens_per_s": theirs["wall"],
            "generate_tokens_per_cpu_s": theirs["cpu"],
            "ratio_wall": ours["wall"] / theirs["wall"],
            "ratio_cpu": ours["cpu"] / theirs["cpu"],
        }
        if not options.json:
            show(name, results[name])
    if options.json:
        print(json.dumps({name: {key: round(value, 2) for key, value in row.items()} for name, row in results.items()}))


def show(name: str, row: dict[str, float]) -> None:
    print(
        f"{name:22} sampler {row['rllm_tokens_per_s']:7.0f} tokens/s {row['rllm_tokens_per_cpu_s']:7.0f} /CPU-s   "
        f"generate {row['generate_tokens_per_s']:7.0f} {row['generate_tokens_per_cpu_s']:7.0f}   "
        f"ratio {row['ratio_wall']:.2f} {row['ratio_cpu']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
