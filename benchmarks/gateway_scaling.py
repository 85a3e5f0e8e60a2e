"""The gateway under many connections and many calls: calls per second, added latency, CPU and memory.

    python benchmarks/gateway_scaling.py [--seconds 3] [--connections 1 16 64 256 1024] [--memory-calls 200000] [--json]

The load, the upstream and the calls are those of `benchmarks/gateway.py`. At each number of connections three
programs take turns: the gateway, the leanest gateway that stores calls (`bare_gateway.py`), and the leanest
forwarder, which stores nothing (`bare_forwarder.py`). Each latency is the time added to that of the upstream alone
with as many connections. `--memory-calls` then sends that many calls through the gateway and prints its memory
meanwhile, which must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gateway
import psutil

MODES = ("json", "stream")
CONNECTIONS = (1, 16, 64, 256, 1024)
NUM_MEMORY_READINGS = 10


def percentiles(latencies: list[float]) -> list[float]:
    """Return latency percentiles 50, 95 and 99, in milliseconds."""
    ordered = sorted(latencies)
    return [1e3 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 0.99)]


class Measured:
    """Process that calls pass through."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[str]) -> None:
        self.name, self.port, self.process = name, port, psutil.Process(process.pid)

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    @property
    def memory_mb(self) -> float:
        return self.process.memory_info().rss / 2**20

    def under_load(self, mode: str, connections: int, seconds: float, direct: list[float]) -> dict[str, Any]:
        """Return the measurements under a load; `direct` are the percentiles of the upstream alone."""
        before = self.cpu_s
        load = gateway._load(self.port, f"/sessions/{mode}-{connections}-SESSION", mode, seconds, connections)
        cpu_s, num_calls = self.cpu_s - before, len(load["latencies"])
        added = [round(ours - theirs, 2) for ours, theirs in zip(percentiles(load["latencies"]), direct, strict=True)]
        return {
            "mode": mode,
            "connections": connections,
            "through": self.name,
            "calls_per_s": round(num_calls / load["elapsed"], 1),
            "added_ms": dict(zip(("p50", "p95", "p99"), added, strict=True)),
            "cpu_s_per_1000": round(1000 * cpu_s / num_calls, 3),
            "memory_mb": round(self.memory_mb, 1),
        }


@contextmanager
def running() -> Iterator[tuple[int, list[Measured]]]:
    """Start the upstream and the programs in front of it; return their ports, the gateway's first."""
    processes: list[subprocess.Popen[str]] = []

    def spawn(*arguments: str) -> subprocess.Popen[str]:
        processes.append(gateway._spawn(*arguments, env={**os.environ, "NO_COLOR": "1"}))
        return processes[-1]

    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="rllm-bench-") as folder:
        try:
            upstream_port = gateway._printed_port(spawn(gateway.__file__, "--role", "upstream"))
            address, store = f"http://127.0.0.1:{upstream_port}/v1", f"sqlite:///{folder}/rllm.db"
            port = gateway._free_port()
            ours = spawn("-m", "rllm", "gateway", "--upstream", address, "--store", store, "--port", str(port))
            bare = spawn(str(here / "bare_gateway.py"), str(upstream_port), f"{folder}/bare.db")
            forwarder = spawn(str(here / "bare_forwarder.py"), str(upstream_port))
            gateway._await_gateway(port, ours)
            yield (
                upstream_port,
                [
                    Measured("rllm", port, ours),
                    Measured("bare gateway", gateway._printed_port(bare), bare),
                    Measured("forwarder", gateway._printed_port(forwarder), forwarder),
                ],
            )
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(timeout=30)


def scale(upstream_port: int, measured: list[Measured], connections: int, seconds: float) -> list[dict[str, Any]]:
    """Measure both modes at one number of connections."""
    results = []
    for mode in MODES:
        direct = percentiles(gateway._load(upstream_port, "", mode, min(seconds, 2.0), connections)["latencies"])
        results += [one.under_load(mode, connections, seconds, direct) for one in measured]
    return results


def memory_over(ours: Measured, num_calls: int) -> list[tuple[int, float]]:
    """Return the number of calls and the megabytes at several points."""
    readings, sent = [(0, ours.memory_mb)], 0
    while sent < num_calls:
        prefix = f"/sessions/memory-{sent}-SESSION"
        while sent < num_calls * len(readings) / NUM_MEMORY_READINGS:
            sent += len(gateway._load(ours.port, f"{prefix}-{sent}", "json", 5.0, 64)["latencies"])
        readings.append((sent, round(ours.memory_mb, 1)))
    return readings


def shown(result: dict[str, Any]) -> str:
    added = " / ".join(f"{value:.1f}" for value in result["added_ms"].values())
    return (
        f"{result['mode']:>6} {result['connections']:5,} connections {result['through']:>12}: "
        f"{result['calls_per_s']:8,.0f} calls/s   added p50 / p95 / p99 {added} ms   "
        f"{result['cpu_s_per_1000']:.3f} CPU-s per 1,000   {result['memory_mb']:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway under many connections and many calls.")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load for each line of the table")
    parser.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS)
    parser.add_argument(
        "--memory-calls", type=int, default=0, help="send this many calls, and print the memory meanwhile"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with running() as (upstream_port, measured):
        for connections in options.connections:
            at_once = scale(upstream_port, measured, connections, options.seconds)
            results += at_once
            if not options.json:
                print(*map(shown, at_once), sep="\n", flush=True)
        readings = memory_over(measured[0], options.memory_calls) if options.memory_calls else []
    if options.json:
        print(json.dumps({"scaling": results, "memory_mb": readings}))
    else:
        print(*(f"{calls:9,} calls: {megabytes:.0f} MB" for calls, megabytes in readings), sep="\n")


if __name__ == "__main__":
    main()
