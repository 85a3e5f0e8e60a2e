"""How fast the trace store writes and reads, and how much room a trace takes: python benchmarks/store.py [--json]

A trace is one call of 1,000 prompt ids and 200 response ids with log-probabilities, and its messages (about 5 kB of
text). Every write waits until it is on disk, with 64 callers at once, as the gateway does. The baseline is the obvious
store: JSON arrays in one row, one commit for each trace, the same durability.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from rllm.store import TraceStore, open_store
from rllm.types import Trace

TRACES_PER_SESSION = 20
CALLERS = 64
VOCABULARY = 152_000
BASELINE_S = 2.0


def make_traces(num_traces: int, seed: int = 0) -> list[Trace]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 10))) for _ in range(5_000)]
    frequencies = [1 / rank for rank in range(1, len(words) + 1)]

    def text(num_words: int) -> str:
        return " ".join(rng.choices(words, frequencies, k=num_words))

    # Drawing the text takes longer than storing it, so a few thousand distinct bodies are shared out.
    bodies = [
        {
            "messages": [{"role": "system", "content": text(120)}, {"role": "user", "content": text(540)}],
            "response": {"role": "assistant", "content": text(140)},
            "prompt_ids": rng.choices(range(VOCABULARY), k=1000),
            "response_ids": rng.choices(range(VOCABULARY), k=200),
            # Servers compute in 32 bits and print that value in full.
            "logprobs": array("f", [-rng.expovariate(1.0) for _ in range(200)]).tolist(),
        }
        for _ in range(min(num_traces, 1_000))
    ]
    return [
        Trace(
            id=f"chatcmpl-{rng.getrandbits(128):032x}",
            call_id="chatcmpl",
            session_id=f"session-{k // TRACES_PER_SESSION}",
            model="policy",
            logprobs_kind="processed",
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 512, "seed": k},
            finish_reason="stop",
            weight_version=7,
            template_hash="ab" * 32,
            started_at=1.7e9 + k,
            timings={"total_s": 0.8123, "first_token_s": 0.0421},
            metadata={"task_id": k},
            **bodies[k % len(bodies)],
        )
        for k in range(num_traces)
    ]


async def write_durably(store: TraceStore, traces: Iterable[Trace]) -> None:
    """64 callers, each of which adds its next trace once its last one is on disk."""
    remaining = iter(traces)

    async def caller() -> None:
        for trace in remaining:
            await asyncio.wrap_future(store.add([trace]))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


def measure_store(traces: list[Trace], path: Path) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    with open_store(str(path)) as store:
        asyncio.run(write_durably(store, traces))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    with open_store(str(path), read_only=True) as store:
        reads = [timed(lambda: store.by_session(random.choice(traces).session_id)) for _ in range(200)]
    return {
        "traces_per_s": len(traces) / wall,
        "cpu_s_per_1000": cpu / len(traces) * 1000,
        "bytes_per_trace": path.stat().st_size / len(traces),
        "read_session_ms": statistics.median(reads) * 1000,
    }


def measure_baseline(traces: list[Trace], path: Path) -> dict[str, float]:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE traces (id TEXT PRIMARY KEY, session_id TEXT, body TEXT)")
    connection.execute("CREATE INDEX by_session ON traces (session_id)")
    num_written = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for trace in traces:
        row = (trace.id, trace.session_id, json.dumps(trace.to_dict()))
        connection.execute("INSERT INTO traces VALUES (?, ?, ?)", row)
        connection.commit()
        num_written += 1
        if time.perf_counter() - wall > BASELINE_S:
            break
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    def read_session() -> list[Trace]:
        session_id = random.choice(traces[:num_written]).session_id
        rows = connection.execute("SELECT body FROM traces WHERE session_id = ? ORDER BY rowid", (session_id,))
        return [Trace.from_dict(json.loads(body)) for (body,) in rows]

    reads = [timed(read_session) for _ in range(100)]
    connection.close()
    return {
        "traces_per_s": num_written / wall,
        "cpu_s_per_1000": cpu / num_written * 1000,
        "bytes_per_trace": path.stat().st_size / num_written,
        "read_session_ms": statistics.median(reads) * 1000,
    }


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=int, default=10_000, help="how many to write (default 10000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    traces = make_traces(args.traces)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "store": measure_store(traces, Path(folder, "traces.db")),
            "baseline": measure_baseline(traces, Path(folder, "baseline.db")),
        }
    if args.json:
        print(json.dumps({"traces": args.traces, "callers": CALLERS, **results}))
        return
    print(f"{args.traces} traces of 1,000 + 200 tokens, durable, {CALLERS} callers; sessions of {TRACES_PER_SESSION}")
    print(f"{'':>18}  {'store':>10}  {'baseline':>10}")
    for name in results["store"]:
        print(f"{name:>18}  {results['store'][name]:>10.2f}  {results['baseline'][name]:>10.2f}")


if __name__ == "__main__":
    main()
