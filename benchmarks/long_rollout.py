"""One long rollout: time and memory of its turns in capture and store.

    python benchmarks/long_rollout.py [--turns 200] [--tokens 100000] [--json]

An agent sends its whole history again in each turn, as agents do, to a gateway over the tiny policy with a durable SQLite
store. Each turn adds a result and an answer, until the last prompt has about `--tokens`. The time of a turn is the CPU time of its
threads: the gateway's (HTTP, JSON, prompt, parent, trace), the store's, and the sampler's, which attends to all earlier tokens.
Printed are means over the first 20 turns and the last 20.

The session is read from the store afterwards: each prompt must begin with all tokens before it, and all turns must be one
sequence, whose sampled tokens are all that the agent was given.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer
from rllm.gateway.upstream import EngineUpstream
from rllm.inference.local import LocalEngine
from rllm.store import open_store
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.sequences import sequences_of
from rllm.types import Step

WORDS = "read the file of tests and change a line that fails in the parser then run it again with more data".split()
ANSWER_TOKENS = 16
WINDOW = 20
THREADS = {"gateway": ("serving", "asyncio", "uvloop"), "store": "rllm-trace-writer", "sampler": "rllm-decode"}
"""Beginnings of the names of their threads."""
TOOL = {"type": "function", "function": {"name": "shell", "description": "Runs a command.", "parameters": {}}}


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of each thread by its name."""
    found: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        if thread.ident is not None:
            found[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def tiny_engine(num_tokens: int) -> LocalEngine:
    """Return the tiny policy, untrained, with room for so many tokens."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, vocab_size=400)
    recipe = TinyPolicyRecipe(context_length=num_tokens)
    return LocalEngine(new_model(tokenizer, recipe), tokenizer, max_concurrent=1, max_length=num_tokens)


def run(num_turns: int, num_tokens: int, folder: Path) -> list[dict[str, float]]:
    """Run the agent, and return the figures of each turn."""
    engine = tiny_engine(num_tokens + 4096)
    rng = random.Random(0)
    per_turn = num_tokens // num_turns - ANSWER_TOKENS
    messages = [{"role": "system", "content": "You work with a shell."}]
    process, turns = psutil.Process(), []
    with (
        open_store(folder / "traces.db") as store,
        GatewayServer(store, EngineUpstream(engine, "policy"), GatewayConfig()) as server,
        httpx.Client() as client,
    ):
        url = f"{server.session_url('long')}/chat/completions"
        for _ in range(num_turns):
            result = " ".join(rng.choices(WORDS, k=per_turn * 4 // 5))
            messages.append({"role": "user", "content": result})
            body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL], "max_tokens": ANSWER_TOKENS})
            before, began = cpu_seconds(), time.perf_counter()
            answer = client.post(url, content=body, headers={"content-type": "application/json"}, timeout=600)
            wall = time.perf_counter() - began
            spent = {name: value - before.get(name, 0.0) for name, value in cpu_seconds().items()}
            messages.append(answer.json()["choices"][0]["message"])
            turns.append(
                {
                    "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
                    "request_kb": len(body) / 1000,
                    "wall_s": wall,
                    "memory_mb": process.memory_info().rss / 1e6,
                    **{
                        f"{part}_ms": 1000 * sum(spent.get(name, 0.0) for name in spent if name.startswith(threads))
                        for part, threads in THREADS.items()
                    },
                }
            )
    engine.close()
    return turns


def check(folder: Path, num_turns: int) -> dict[str, float]:
    """Read the session, and return its size.

    Raises:
        AssertionError: if it is not one sequence of all sampled tokens.
    """
    with open_store(folder / "traces.db") as store:
        began = time.process_time()
        traces = store.by_session("long")
        read_s = time.process_time() - began
    steps = [Step(id=trace.id) for trace in traces]
    for step, trace in zip(steps, traces, strict=True):
        step.fill_from(trace)
    [sequence] = sequences_of(steps)
    assert len(sequence.spans) == num_turns
    assert sequence.num_sampled == sum(len(trace.response_ids) for trace in traces)
    assert all(trace.parent_id == before.id for before, trace in pairwise(traces))
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"tokens": len(sequence.ids), "sampled": sequence.num_sampled, "read_s": read_s, "stored_mb": size / 1e6}


def means(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(turn[name] for turn in turns) / len(turns) for name in turns[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        turns = run(options.turns, options.tokens, Path(folder))
        stored = check(Path(folder), options.turns)
    first, last = means(turns[1 : WINDOW + 1]), means(turns[-WINDOW:])
    if options.json:
        print(json.dumps({"first": first, "last": last, "stored": stored}))
        return
    print(f"{'':16}{'first 20':>12}{'last 20':>12}{'ratio':>8}")
    for name in first:
        print(f"{name:16}{first[name]:12.2f}{last[name]:12.2f}{last[name] / max(first[name], 1e-9):8.2f}")
    print(", ".join(f"{name} {value:.2f}" for name, value in stored.items()))


if __name__ == "__main__":
    main()
