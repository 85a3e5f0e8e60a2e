"""Cost of capturing a call: calls per second, CPU and added latency of the gateway, and of the leanest one possible.

    python benchmarks/gateway.py [--seconds 8] [--connections 64] [--litellm .litellm] [--json]

A load generator and a scripted upstream of raw sockets, which cost little, share the machine with two gateways that
are measured in turns, so that both see the same noise: ours, started by its real command line on a SQLite file, and
`bare_gateway.py`, which parses, keeps and releases each answer and does nothing else. A call carries 1,000 prompt ids
and 200 response ids with log-probabilities. At the end every acknowledged call must be in the store. `--litellm`
takes turns with a LiteLLM proxy that stores its calls too; the option names the folder into which `make test-litellm`
installs LiteLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import litellm_proxy
import psutil

NUM_PROMPT_IDS, NUM_RESPONSE_IDS = 1_000, 200
CALLS_PER_SESSION = 10
NUM_TURNS = 4
"""Turns of each program: several short ones, because the machine's speed changes within seconds."""


# --- the upstream: a fixed answer in vLLM's shape, as fast as a socket takes it ---------------------------------------


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _logprobs(first: int, count: int) -> dict[str, Any]:
    entries = [
        {"token": f"t{k}", "logprob": -0.5 - k / 1000, "bytes": [116, 48 + k % 10], "top_logprobs": []}
        for k in range(first, first + count)
    ]
    return {"content": entries}


_HEAD = {"id": "chatcmpl-upstream", "created": 1_700_000_000, "model": "scripted"}
_PROMPT_IDS = [(7 * k) % 150_000 for k in range(NUM_PROMPT_IDS)]
_RESPONSE_IDS = [(11 * k) % 150_000 for k in range(NUM_RESPONSE_IDS)]
_USAGE = {
    "prompt_tokens": NUM_PROMPT_IDS,
    "completion_tokens": NUM_RESPONSE_IDS,
    "total_tokens": NUM_PROMPT_IDS + NUM_RESPONSE_IDS,
}


def whole_answer() -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * NUM_RESPONSE_IDS},
        "logprobs": _logprobs(0, NUM_RESPONSE_IDS),
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": _RESPONSE_IDS,
    }
    body = _json(
        {**_HEAD, "object": "chat.completion", "choices": [choice], "usage": _USAGE, "prompt_token_ids": _PROMPT_IDS}
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def streamed_answer() -> bytes:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + _json({**_HEAD, "object": "chat.completion.chunk", "choices": choices, **more}) + b"\n\n"

    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events = [chunk([opening], prompt_token_ids=_PROMPT_IDS)]
    for k, token_id in enumerate(_RESPONSE_IDS):
        reason = "stop" if k == NUM_RESPONSE_IDS - 1 else None
        delta = {"index": 0, "delta": {"content": "word "}, "logprobs": _logprobs(k, 1)}
        events.append(chunk([{**delta, "finish_reason": reason, "token_ids": [token_id]}]))
    events += [chunk([], usage=_USAGE), b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    # Like real servers: every event is a separate HTTP chunk.
    return b"".join([head, *(b"%x\r\n%s\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"])


MODELS = b'{"object":"list","data":[{"id":"scripted","object":"model","created":0,"owned_by":"rllm"}]}'


class Upstream(asyncio.Protocol):
    """Server that answers each request with fixed bytes; it parses just enough HTTP to find the end of a request."""

    whole, streamed = whole_answer(), streamed_answer()
    models = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(MODELS),
        MODELS,
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (size := request_size(self.buffer)) is not None:
            request, self.buffer = self.buffer[:size], self.buffer[size:]
            if request.startswith(b"GET"):
                self.transport.write(self.models)
            else:
                wants_stream = b'"stream":true' in request or b'"stream": true' in request
                self.transport.write(self.streamed if wants_stream else self.whole)


def request_size(buffer: bytes) -> int | None:
    """Return the size of the first request in the buffer, or `None` while it is incomplete."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = buffer[:end].lower()
    at = head.find(b"content-length:")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    return end + 4 + length if len(buffer) >= end + 4 + length else None


async def serve_upstream() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the load: keep-alive connections, one call in flight on each -----------------------------------------------------


class Connection(asyncio.Protocol):
    """Keep-alive connection that sends the next call as soon as the answer to the last one has arrived."""

    def __init__(self, number: int, prefix: str, body: bytes, deadline: float, closed: asyncio.Future[None]) -> None:
        self.number, self.prefix, self.body, self.deadline, self.closed = number, prefix, body, deadline, closed
        self.latencies: list[float] = []
        self.ids: list[str] = []
        self.failure: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def send(self) -> None:
        session = f"bench-{self.number}-{len(self.ids) // CALLS_PER_SESSION}"
        path = f"{self.prefix.replace('SESSION', session)}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(self.body)}\r\n\r\n"
        self.parts: list[bytes] = []
        self.received, self.expected = 0, -1
        self.sent_at = time.perf_counter()
        self.transport.write(head.encode() + self.body)

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.received += len(data)
        if self.expected < 0:
            self.read_head()
        if self.expected > 0:
            complete = self.received >= self.expected
        else:  # The last chunk of a chunked answer may arrive in pieces.
            complete = b"".join(self.parts[-2:]).endswith(b"\r\n0\r\n\r\n")
        if complete:
            self.finish()

    def read_head(self) -> None:
        head, separator, _ = b"".join(self.parts).partition(b"\r\n\r\n")
        if not separator:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.failure = b"".join(self.parts)[:500].decode(errors="replace")
            self.transport.close()
        lower = head.lower()
        at = lower.find(b"content-length:")
        self.expected = len(head) + 4 + int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0

    def finish(self) -> None:
        self.latencies.append(time.perf_counter() - self.sent_at)
        answer = b"".join(self.parts)
        at = answer.find(b'"id":"') + 6
        self.ids.append(answer[at : answer.find(b'"', at)].decode())
        if time.perf_counter() < self.deadline:
            self.send()
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def generate_load(port: int, prefix: str, *, stream: bool, seconds: float, connections: int) -> None:
    messages = [{"role": "user", "content": "count to two hundred " * 20}]
    request: dict[str, Any] = {"model": "scripted", "messages": messages, "temperature": 1.0}
    body = _json({**request, "stream": True} if stream else request)
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    opened = [Connection(k, prefix, body, started + seconds, loop.create_future()) for k in range(connections)]
    for connection in opened:
        await loop.create_connection(lambda c=connection: c, "127.0.0.1", port)
    await asyncio.wait([connection.closed for connection in opened], timeout=seconds + 30)
    elapsed = time.perf_counter() - started
    failures = [connection.failure for connection in opened if connection.failure]
    latencies = sorted(latency for connection in opened for latency in connection.latencies)
    ids = [trace_id for connection in opened for trace_id in connection.ids]
    print(json.dumps({"elapsed": elapsed, "latencies": latencies, "ids": ids, "failures": failures}))


# --- the measurement --------------------------------------------------------------------------------------------------


def _spawn(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], text=True, stdout=subprocess.PIPE, **options)


def _load(port: int, prefix: str, mode: str, seconds: float, connections: int) -> dict[str, Any]:
    load = _spawn(__file__, "--role", "load", str(port), prefix, mode, str(seconds), str(connections))
    output, _ = load.communicate(timeout=seconds + 60)
    result: dict[str, Any] = json.loads(output)
    if result["failures"] or not result["latencies"]:
        sys.exit(f"{len(result['failures'])} connections failed; the first error: {result['failures'][:1]}")
    return result


def _printed_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def _milliseconds(latencies: list[float]) -> tuple[float, float]:
    return statistics.median(latencies) * 1e3, latencies[int(0.95 * len(latencies))] * 1e3


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_gateway(port: int, process: subprocess.Popen[str]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            sys.exit(f"the gateway ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit("the gateway was not ready within 30 s")


def _stored_ids(database: Path) -> set[str]:
    with closing(sqlite3.connect(database)) as connection, connection:
        return {row[0] for row in connection.execute("SELECT id FROM traces")}


Measured: TypeAlias = tuple[int, psutil.Process] | tuple[int, psutil.Process, str]
"""Port, process, and the prefix of `/v1` in its paths if it differs from ours."""


class Tally:
    """Sums over several turns of load on one gateway."""

    def __init__(self, port: int, process: psutil.Process, prefix: str = "/sessions/MODE-SESSION") -> None:
        self.port, self.process, self.prefix = port, process, prefix
        self.elapsed = self.cpu_s = 0.0
        self.latencies: list[float] = []
        self.ids: list[str] = []

    def turn(self, mode: str, number: int, seconds: float, connections: int) -> None:
        before = self.process.cpu_times()
        load = _load(self.port, self.prefix.replace("MODE", f"{mode}-{number}"), mode, seconds, connections)
        after = self.process.cpu_times()
        self.cpu_s += after.user + after.system - before.user - before.system
        self.elapsed += load["elapsed"]
        self.latencies += load["latencies"]
        self.ids += load["ids"]

    def result(self, direct_latencies: list[float]) -> dict[str, float]:
        calls = len(self.latencies)
        (direct_p50, direct_p95), (p50, p95) = _milliseconds(direct_latencies), _milliseconds(sorted(self.latencies))
        return {
            "calls_per_s": round(calls / self.elapsed, 1),
            "cpu_s_per_1000": round(1000 * self.cpu_s / calls, 4),
            "added_p50_ms": round(p50 - direct_p50, 2),
            "added_p95_ms": round(p95 - direct_p95, 2),
            "calls": calls,
        }


def measure(
    mode: str, upstream_port: int, gateways: dict[str, Measured], seconds: float, connections: int
) -> dict[str, Any]:
    """Measure one mode (`json` or `stream`): the upstream alone, a short warm-up, then the gateways in turns."""
    direct = _load(upstream_port, "", mode, min(seconds, 2.0), connections)
    tallies = {name: Tally(*measured) for name, measured in gateways.items()}
    acknowledged = {
        name: _load(tally.port, tally.prefix.replace("MODE", "warm"), mode, 1.0, connections)["ids"]
        for name, tally in tallies.items()
    }
    for number in range(NUM_TURNS):
        for tally in tallies.values():
            tally.turn(mode, number, seconds / NUM_TURNS, connections)
    results = {name: tally.result(direct["latencies"]) for name, tally in tallies.items()}
    ours, bare = results["rllm"], results["bare"]
    return {
        "mode": mode,
        **ours,
        **{name: result for name, result in results.items() if name != "rllm"},
        "cpu_ratio_to_bare": round(ours["cpu_s_per_1000"] / bare["cpu_s_per_1000"], 3),
        "throughput_ratio_to_bare": round(ours["calls_per_s"] / bare["calls_per_s"], 3),
        "direct_calls_per_s": round(len(direct["latencies"]) / direct["elapsed"], 1),
        "ids": {name: acknowledged[name] + tallies[name].ids for name in gateways},
    }


def run(seconds: float, connections: int, litellm: Path | None = None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rllm-bench-") as folder:
        databases = {name: Path(folder) / f"{name}.db" for name in ("rllm", "bare")}
        upstream = _spawn(__file__, "--role", "upstream")
        upstream_port = _printed_port(upstream)
        bare = _spawn(str(Path(__file__).with_name("bare_gateway.py")), str(upstream_port), str(databases["bare"]))
        address, store, port = f"http://127.0.0.1:{upstream_port}/v1", f"sqlite:///{databases['rllm']}", _free_port()
        command = ["-m", "rllm", "gateway", "--upstream", address, "--store", store, "--port", str(port)]
        gateway = _spawn(*command, env={**os.environ, "NO_COLOR": "1"})
        children = [gateway, bare, upstream]
        try:
            _await_gateway(port, gateway)
            gateways: dict[str, Measured] = {
                "rllm": (port, psutil.Process(gateway.pid)),
                "bare": (_printed_port(bare), psutil.Process(bare.pid)),
            }
            if litellm is not None:
                proxy_port = _free_port()
                proxy = litellm_proxy.start(litellm, Path(folder), upstream_port, proxy_port)
                children.insert(0, proxy)
                gateways["litellm"] = (proxy_port, psutil.Process(proxy.pid), "")
            results = [measure(mode, upstream_port, gateways, seconds, connections) for mode in ("json", "stream")]
            stored = {name: _stored_ids(database) for name, database in databases.items()}
        finally:
            for child in children:
                child.terminate()
                child.wait(timeout=30)
        for result in results:
            ids = result.pop("ids")
            result["acknowledged_but_not_stored"] = len(set(ids["rllm"]) - stored["rllm"])
            result["bare"]["acknowledged_but_not_stored"] = len(set(ids["bare"]) - stored["bare"])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure calls per second, CPU and added latency of the gateway.")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--litellm", type=Path, help="folder in which LiteLLM is installed, to measure its proxy too")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case ["upstream"]:
            asyncio.run(serve_upstream())
        case ["load", port, prefix, mode, seconds, connections]:
            load = generate_load(
                int(port), prefix, stream=mode == "stream", seconds=float(seconds), connections=int(connections)
            )
            asyncio.run(load)
        case _:
            results = run(options.seconds, options.connections, options.litellm)
            if options.json:
                print(json.dumps({result["mode"]: result for result in results}))
            else:
                report(results)
            if any(result["acknowledged_but_not_stored"] for result in results):
                sys.exit("acknowledged calls are missing from the store")


def report(results: list[dict[str, Any]]) -> None:
    for result in results:
        shown_of = {"rllm": result, "bare": result["bare"], "litellm": result.get("litellm")}
        for name, shown in shown_of.items():
            if shown is None:
                continue
            print(
                f"{result['mode']:>6} {name}: {shown['calls_per_s']:7,.0f} calls/s   {shown['cpu_s_per_1000']:.3f} CPU-s per 1,000   "
                f"added p50 {shown['added_p50_ms']:.1f} ms, p95 {shown['added_p95_ms']:.1f} ms   "
                f"lost {shown.get('acknowledged_but_not_stored', '?')} of {shown['calls']:,}"
            )
        print(
            f"{'':>6} ours to bare: {result['cpu_ratio_to_bare']:.2f} of the CPU, {result['throughput_ratio_to_bare']:.2f} of the calls/s   "
            f"(upstream alone {result['direct_calls_per_s']:,.0f} calls/s)"
        )


if __name__ == "__main__":
    main()
