"""Speed of the trace store, and size of its traces: python benchmarks/store.py [--json]

A trace is one call of 1,000 prompt ids and 200 response ids with log-probabilities, and its messages (about 5 kB of
text). Every write waits until it is on disk, with 64 callers at once, as in the gateway. Three kinds of sessions:

    apart         20 calls with nothing in common; ids as from a tokenizer, in which frequent words have small ids
    uniform       the same with ids drawn evenly from the vocabulary: the worst case, which real text does not cause
    conversation  20 turns, in which each prompt extends the one before, from 1,000 ids to 5,750

The baseline is the simplest store with the same durability, writing `apart`: JSON arrays in one row, and one commit
for each trace. `--growth 1000000` writes a million traces and prints the cost of writes as the store grows, and of
reading a session at the end. `--store postgresql://...` measures another store.

Budget: at least 3,000 durable traces/s, and at most 7 kB each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sqlite3
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from rllm.gateway.core import DurableWrites
from rllm.store import TraceStore, open_store
from rllm.types import Trace

TRACES_PER_SESSION = 20
CALLERS = 64
VOCABULARY = 152_000
NUM_WORDS = 5_000
NUM_BODIES = 1_000
"""Distinct bodies: drawing text takes longer than storing it, so traces reuse them."""
BASELINE_S = 2.0
WINDOW = 5_000
"""Number of traces over which the cost of a write is measured while the store grows."""


class Language:
    """Vocabulary of words with their frequencies, each of one or two ids."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 8))) for _ in range(NUM_WORDS)]
        self._frequencies = [1 / rank for rank in range(1, NUM_WORDS + 1)]
        self._ids = [self._ids_of(rank) for rank in range(1, NUM_WORDS + 1)]

    def draw(self, num_ids: int) -> tuple[str, list[int]]:
        """Return a text with this number of ids, and the ids."""
        drawn = self._rng.choices(range(NUM_WORDS), self._frequencies, k=num_ids)
        ids = [token for word in drawn for token in self._ids[word]][:num_ids]
        return " ".join(self._words[word] for word in drawn[: round(num_ids / 1.4)]), ids

    def _ids_of(self, rank: int) -> list[int]:
        # A tokenizer's ids are approximately in the order of frequency.
        count = 1 if self._rng.random() < 0.6 else 2
        return [min(VOCABULARY - 1, int(math.exp(self._rng.gauss(math.log(20 * rank), 1.2)))) for _ in range(count)]


def apart(language: Language, rng: random.Random, *, uniform: bool = False) -> list[dict]:
    """Return the random parts of traces; those of one session have nothing in common."""
    bodies = []
    for _ in range(NUM_BODIES):
        (system, first), (user, second), (answer, response_ids) = map(language.draw, (180, 820, 200))
        ids = rng.choices(range(VOCABULARY), k=1200) if uniform else [*first, *second, *response_ids]
        bodies.append(
            {
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
                "response": {"role": "assistant", "content": answer},
                "prompt_ids": ids[:1000],
                "response_ids": ids[1000:],
                "logprobs": logprobs(rng, 200),
            }
        )
    return bodies


def conversations(language: Language, rng: random.Random) -> list[dict]:
    """Return the random parts of traces of sessions in which every turn continues the one before."""
    bodies = []
    for _ in range(NUM_BODIES // TRACES_PER_SESSION):
        messages, ids = [], []
        for turn in range(TRACES_PER_SESSION):
            (asked, asked_ids), (answer, response_ids) = language.draw(50 if turn else 1000), language.draw(200)
            messages, ids = [*messages, {"role": "user", "content": asked}], ids + asked_ids
            response = {"role": "assistant", "content": answer}
            bodies.append(
                {
                    "messages": messages,
                    "response": response,
                    "prompt_ids": ids,
                    "response_ids": response_ids,
                    "logprobs": logprobs(rng, 200),
                }
            )
            messages, ids = [*messages, response], ids + response_ids
    return bodies


def logprobs(rng: random.Random, count: int) -> list[float]:
    """Return log-probabilities as servers do: computed in 32 bits, and printed in full."""
    return array("f", [-rng.expovariate(1.0) for _ in range(count)]).tolist()


def traces_of(bodies: list[dict], rng: random.Random) -> Iterator[Trace]:
    """Yield an endless stream of traces."""
    k, parent_id = 0, None
    while True:
        trace = Trace(
            id=f"chatcmpl-{rng.getrandbits(128):032x}",
            call_id="chatcmpl",
            session_id=f"session-{k // TRACES_PER_SESSION}",
            parent_id=parent_id if k % TRACES_PER_SESSION else None,
            model="policy",
            logprobs_kind="processed",
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 512, "seed": k},
            finish_reason="stop",
            weight_version=7,
            template_hash="ab" * 32,
            started_at=1.7e9 + k,
            timings={"total_s": 0.8123, "first_token_s": 0.0421},
            metadata={"task_id": k // TRACES_PER_SESSION},
            **bodies[k % len(bodies)],
        )
        yield trace
        k, parent_id = k + 1, trace.id


def by_turns(traces: list[Trace]) -> list[Trace]:
    """Return traces in the order in which 64 concurrent sessions make their calls."""
    size = CALLERS * TRACES_PER_SESSION
    blocks = [traces[start : start + size] for start in range(0, len(traces), size)]
    return [
        trace for block in blocks for turn in range(TRACES_PER_SESSION) for trace in block[turn::TRACES_PER_SESSION]
    ]


async def write_durably(store: TraceStore, traces: Iterable[Trace]) -> None:
    """Run 64 callers, each of which adds its next trace once its last one is on disk."""
    remaining = iter(traces)
    writes = DurableWrites()

    async def caller() -> None:
        for trace in remaining:
            await writes.wait(store.add([trace]))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


def write_cost(store: TraceStore, traces: list[Trace]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(write_durably(store, traces))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"traces_per_s": len(traces) / wall, "cpu_s_per_1000": cpu / len(traces) * 1000}


def read_cost(store: TraceStore, num_traces: int) -> dict[str, float]:
    """Measure the time of reading random sessions."""
    reads = []
    for _ in range(200):
        session_id = f"session-{random.randrange(num_traces // TRACES_PER_SESSION)}"
        reads.append(timed(partial(store.by_session, session_id)) * 1000)
    return {"read_session_ms": statistics.median(reads), "read_p95_ms": statistics.quantiles(reads, n=20)[-1]}


def measure_store(traces: list[Trace], url: str) -> dict[str, float]:
    store = open_store(url)
    cost = write_cost(store, by_turns(traces))
    cost |= {"bytes_per_trace": num_bytes(store) / len(traces)} | read_cost(store, len(traces))
    for number in range(-(-len(traces) // TRACES_PER_SESSION) if url.startswith("postgres") else 0):
        store.delete(f"session-{number}")
    store.close()
    return cost


def num_bytes(store: TraceStore) -> float:
    return store.num_bytes()


def grow(url: str, num_traces: int, bodies: list[dict], rng: random.Random) -> list[dict[str, float]]:
    """Measure writes while the store grows to this many traces, and reads at each mark."""
    marks = [size for size in (1_000, 10_000, 100_000, 300_000, 1_000_000, 3_000_000) if size <= num_traces]
    source, found, written, last = traces_of(bodies, rng), [], 0, {}
    with open_store(url) as store:
        for mark in marks:
            while written < mark:
                size = min(WINDOW, mark - written)
                last = write_cost(store, by_turns(list(islice(source, size))))
                written += size
            size = {"traces": written, "bytes_per_trace": num_bytes(store) / written}
            found.append(size | last | read_cost(store, written))
    return found


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

    reads = [timed(read_session) * 1000 for _ in range(100)]
    connection.close()
    return {
        "traces_per_s": num_written / wall,
        "cpu_s_per_1000": cpu / num_written * 1000,
        "bytes_per_trace": path.stat().st_size / num_written,
        "read_session_ms": statistics.median(reads),
        "read_p95_ms": statistics.quantiles(reads, n=20)[-1],
    }


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=int, default=10_000, help="traces to write of each kind (default 10000)")
    parser.add_argument(
        "--growth", type=int, default=0, help="write this many instead, and print the cost as the store grows"
    )
    parser.add_argument("--store", help="URL of the store to measure (default: a SQLite file in a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rng = random.Random(0)
    language = Language(rng)
    with tempfile.TemporaryDirectory() as folder:
        if args.growth:
            url = args.store or str(Path(folder, "traces.db"))
            rows = {f"{row['traces']:,}": row for row in grow(url, args.growth, apart(language, rng), rng)}
        else:
            rows = measure_kinds(args, language, rng, folder)
    if args.json:
        print(json.dumps({"traces": args.growth or args.traces, "callers": CALLERS, **rows}))
        return
    print(f"traces of 1,000 + 200 tokens, durable, {CALLERS} callers; sessions of {TRACES_PER_SESSION}")
    print(f"{'':>18}" + "".join(f"  {kind:>12}" for kind in rows))
    for name in next(iter(rows.values())):
        print(f"{name:>18}" + "".join(f"  {row[name]:>12.2f}" for row in rows.values()))


def measure_kinds(
    args: argparse.Namespace, language: Language, rng: random.Random, folder: str
) -> dict[str, dict[str, float]]:
    kinds = {
        "apart": apart(language, rng),
        "uniform": apart(language, rng, uniform=True),
        "conversation": conversations(language, rng),
    }
    samples = {kind: list(islice(traces_of(bodies, rng), args.traces)) for kind, bodies in kinds.items()}
    found = {}
    for kind, traces in samples.items():
        found[kind] = measure_store(traces, args.store or str(Path(folder, f"{kind}.db")))
    return found | {"baseline": measure_baseline(samples["apart"], Path(folder, "baseline.db"))}


if __name__ == "__main__":
    main()
