"""Memory of log-probabilities and their gradient at a vocabulary of 150,000: the trainer's method, and full logits.

    python benchmarks/logprob_memory.py [--tokens 256 512 1024 2048] [--vocabulary 150000] [--json]

Each row is a separate process: a small Qwen3 (hidden size 64, two layers), sequences of 256 tokens all of which are
trained on, one forward and one backward pass, and the memory that these add at their peak. The memory of the
trainer's method must not grow with the number of tokens; that of `full` is several times tokens x vocabulary x 4
bytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rllm.algorithms.batch import Batch, StepSpan, TokenSequence
from rllm.backends.local.policy import Policy, Trunk

LENGTH = 256


def build_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def ours(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probability of every token but the first of each sequence, as the trainer computes it."""
    sequences = [
        TokenSequence(ids=row, spans=[StepSpan(step_id="", start=1, stop=LENGTH)], logprobs=[0.0] * (LENGTH - 1))
        for row in ids.tolist()
    ]
    policy = Policy.of(model, Trunk.of(model.base_model))
    return policy.logprobs(Batch.of(sequences))[0]


def full(model: Any, ids: Tensor) -> Tensor:
    """Return the same, computed by a softmax over all logits at once."""
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {"ours": ours, "full": full}


def megabytes() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, num_tokens: int, vocabulary: int) -> dict[str, float]:
    torch.set_num_threads(1)
    model = build_model(vocabulary)
    ids = torch.randint(0, vocabulary, (num_tokens // LENGTH, LENGTH))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    before = megabytes()
    logprobs = WAYS[way](model, ids)
    logprobs.mean().backward()
    return {"added_mb": megabytes() - before, "mean_logprob": float(logprobs.detach().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of log-probabilities at a large vocabulary.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048], help="multiples of 256")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if wrong := [number for number in options.tokens if number < LENGTH or number % LENGTH]:
        parser.error(f"--tokens {wrong[0]}: use multiples of {LENGTH}")
    if options.way:
        print(json.dumps(measure(options.way, options.tokens[0], options.vocabulary)))
        return
    rows = []
    for num_tokens in options.tokens:
        found = {way: in_its_own_process(way, num_tokens, options.vocabulary) for way in WAYS}
        assert abs(found["ours"]["mean_logprob"] - found["full"]["mean_logprob"]) < 1e-4, "both compute the same"
        rows.append({"tokens": num_tokens, **{f"{way}_mb": found[way]["added_mb"] for way in WAYS}})
        if not options.json:
            print("{tokens:6,} tokens: ours {ours_mb:7.0f} MB   full {full_mb:7.0f} MB".format(**rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"vocabulary": options.vocabulary, "rows": rows}))


def in_its_own_process(way: str, num_tokens: int, vocabulary: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--tokens", str(num_tokens), "--vocabulary", str(vocabulary)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
