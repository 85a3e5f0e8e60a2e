"""One long rollout: time and memory of its turns in capture and store.

    python benchmarks/long_rollout.py [--turns 200] [--tokens 100000] [--json]

An agent sends its whole history again in each turn, as agents do, to a gateway over the tiny policy with a durable
SQLite store. Each turn adds a tool result and an answer, so that the prompts grow evenly, up to `--tokens`. The time
of a turn is the CPU time of its threads: the gateway's (HTTP, JSON, prompt, parent, trace), the store's, and the
sampler's, which attends to all earlier tokens. The floor is the time of a bare server on the same stack, which reads
the body of the same request and parses its JSON. The output has means over the first 20 and the last 20 turns, and
the memory of each part.

The session is read from the store afterwards: the tokens of each trace must be those of the sampler, each prompt must
begin with all tokens before it, and all turns must be one sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import uvicorn

from rllm.gateway.config import GatewayConfig
from rllm.gateway.server import GatewayServer, bind, url_of
from rllm.gateway.upstream import EngineUpstream
from rllm.inference.engine import ModelOutput
from rllm.inference.local import LocalEngine
from rllm.store import open_store
from rllm.testing.tiny_policy import TinyPolicyRecipe, new_model, train_tokenizer
from rllm.trainer.sequences import sequences_of
from rllm.types import Step

WORDS = "read the file of tests and change a line that fails in the parser then run it again with more data".split()
ANSWER_TOKENS = 16
WINDOW = 20
NUM_WARM_UP = 5
THREADS = {"gateway": ("serving", "asyncio", "uvloop"), "store": "rllm-trace-writer", "sampler": "rllm-decode"}
"""Prefixes of the names of each part's threads."""
TOOL = {"type": "function", "function": {"name": "shell", "description": "Runs a command.", "parameters": {}}}


@dataclass(kw_only=True)
class Run:
    """Measurements and sampled tokens of a rollout."""

    turns: list[dict[str, float]] = field(default_factory=list)
    """Measurements of each turn."""
    sampled: list[tuple[bytes, list[int]]] = field(default_factory=list)
    """Digest of the prompt's ids, and the answer's ids, of each turn, as the sampler has them."""
    memory: dict[str, float] = field(default_factory=dict)
    """Megabytes of each part of the process."""


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of each thread by its name."""
    found: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        if thread.ident is not None:
            found[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


class Agent:
    """Agent that adds a result in each turn, which makes the next prompt as long as requested."""

    def __init__(self, tokenizer: Any) -> None:
        self.messages = [{"role": "system", "content": "You work with a shell."}]
        self.num_tokens = 0
        """Tokens of the conversation so far."""
        self._rng = random.Random(0)
        self._sizes = {word: len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in WORDS}

    def ask(self, num_tokens: int) -> bytes:
        """Return the next request, whose prompt has about this many tokens."""
        words: list[str] = []
        while self.num_tokens < num_tokens:
            words.append(self._rng.choice(WORDS))
            self.num_tokens += self._sizes[words[-1]]
        self.messages.append({"role": "user", "content": " ".join(words)})
        request = {"model": "m", "messages": self.messages, "tools": [TOOL], "max_tokens": ANSWER_TOKENS}
        return json.dumps(request).encode()

    def take(self, answer: Mapping[str, Any]) -> None:
        """Add an answer to the history."""
        self.messages.append(answer["choices"][0]["message"])
        self.num_tokens = answer["usage"]["total_tokens"]


class TinyEngine(LocalEngine):
    """Engine of the untrained tiny policy, which keeps its latest output."""

    def __init__(self, num_tokens: int) -> None:
        tokenizer = train_tokenizer([" ".join(WORDS)] * 4, vocab_size=400)
        model = new_model(tokenizer, TinyPolicyRecipe(context_length=num_tokens))
        super().__init__(model, tokenizer, max_concurrent=1, max_length=num_tokens)
        self.latest = ModelOutput()

    async def get_model_response(self, *args: Any, **params: Any) -> ModelOutput:
        self.latest = await super().get_model_response(*args, **params)
        return self.latest


@contextmanager
def bare_server() -> Iterator[str]:
    """Serve an application that only reads requests and parses their JSON; yield its address."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message["body"])
            more = message["more_body"]
        orjson.loads(b"".join(parts))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_keep_alive=3600))
    thread = threading.Thread(target=server.run, args=([listener],), name="floor")
    thread.start()
    try:
        yield url_of(listener, "127.0.0.1")
    finally:
        server.should_exit = True
        thread.join()


def run(num_turns: int, num_tokens: int, folder: Path) -> Run:
    """Run the agent."""
    process = psutil.Process()
    engine = TinyEngine(num_tokens + 4096)
    agent, done = Agent(engine.tokenizer), Run()
    done.memory["program"] = process.memory_info().rss / 1e6
    with (
        open_store(folder / "traces.db") as store,
        GatewayServer(store, EngineUpstream(engine, "policy"), GatewayConfig()) as server,
        bare_server() as bare_url,
        httpx.Client(headers={"content-type": "application/json"}, timeout=None) as client,
    ):
        warm_up = Agent(engine.tokenizer)
        for turn in range(NUM_WARM_UP):  # for work that a process does once, such as reading the template
            url = f"{server.session_url('warm-up')}/chat/completions"
            warm_up.take(client.post(url, content=warm_up.ask(100 * turn)).json())
        url = f"{server.session_url('long')}/chat/completions"
        for turn in range(num_turns):
            body = agent.ask(num_tokens * (turn + 1) // num_turns)
            before = cpu_seconds()
            client.post(bare_url, content=body)
            floor = 1000 * (cpu_seconds()["floor"] - before["floor"])
            before, began = cpu_seconds(), time.perf_counter()
            answer = client.post(url, content=body).json()
            wall = time.perf_counter() - began
            spent = {name: value - before.get(name, 0.0) for name, value in cpu_seconds().items()}
            agent.take(answer)
            prompt_ids = array("I", engine.latest.prompt_ids)
            done.sampled.append((sha256(prompt_ids).digest(), engine.latest.completion_ids))
            parts = {
                part: 1000 * sum(spent.get(name, 0.0) for name in spent if name.startswith(threads))
                for part, threads in THREADS.items()
            }
            done.turns.append(
                {
                    "prompt_tokens": len(prompt_ids),
                    "request_kb": len(body) / 1000,
                    "wall_s": wall,
                    "memory_mb": process.memory_info().rss / 1e6,
                    "floor_ms": floor,
                    "above_floor_ms": parts["gateway"] - floor,
                    **{f"{part}_ms": value for part, value in parts.items()},
                }
            )
        session = asyncio.run(server._sessions.get("long"))
        done.memory |= {name: size / 1e6 for name, size in engine.memory().items()}
        done.memory["gateway_session"] = session.num_bytes / 1e6
    done.memory["all"] = process.memory_info().rss / 1e6
    with engine.paused():
        engine.drop_states()
    done.memory["all_but_sampler_states"] = process.memory_info().rss / 1e6
    engine.close()
    return done


def check(folder: Path, sampled: Sequence[tuple[bytes, list[int]]]) -> dict[str, float]:
    """Check the session in the store, and return its size.

    Raises:
        AssertionError: if it is not one sequence of exactly the sampled tokens.
    """
    num_turns = len(sampled)
    with open_store(folder / "traces.db") as store:
        began = time.process_time()
        traces = store.by_session("long")
        read_s = time.process_time() - began
    assert [(sha256(array("I", trace.prompt_ids)).digest(), trace.response_ids) for trace in traces] == sampled
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
        done = run(options.turns, options.tokens, Path(folder))
        stored = check(Path(folder), done.sampled)
    assert stored["tokens"] >= options.tokens
    first, last = means(done.turns[:WINDOW]), means(done.turns[-WINDOW:])
    if options.json:
        print(json.dumps({"first": first, "last": last, "memory_mb": done.memory, "stored": stored}))
        return
    print(f"{'':16}{'first 20':>12}{'last 20':>12}{'ratio':>8}")
    for name in first:
        print(f"{name:16}{first[name]:12.2f}{last[name]:12.2f}{last[name] / max(first[name], 1e-9):8.2f}")
    print("memory, MB:", ", ".join(f"{name} {value:.2f}" for name, value in done.memory.items()))
    print(", ".join(f"{name} {value:.2f}" for name, value in stored.items()))


if __name__ == "__main__":
    main()
