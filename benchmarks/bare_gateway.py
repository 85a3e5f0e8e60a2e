"""The leanest gateway that captures calls durably: the baseline of `benchmarks/gateway.py`.

    python benchmarks/bare_gateway.py UPSTREAM_PORT DATABASE

Raw sockets on both sides. Each answer is parsed, its ids and log-probabilities are stored as blobs, and it is
released after a group commit with `synchronous=FULL`. There is nothing else: no sessions, no errors, no checks, no
metrics. A stream's chunks are rebuilt one by one, and its last ones are held back until the commit.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import sqlite3
import sys
import threading
from array import array
from collections.abc import Callable
from typing import Any

import orjson
import uvloop

Row = tuple[str, bytes, bytes, bytes, bytes]

SCHEMA = "CREATE TABLE traces (id TEXT PRIMARY KEY, prompt_ids BLOB, response_ids BLOB, logprobs BLOB, document BLOB)"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Writer:
    """Thread that commits all waiting calls, then releases their answers with one wake-up of the event loop."""

    def __init__(self, database: str, loop: asyncio.AbstractEventLoop) -> None:
        self.database, self.loop = database, loop
        self.waiting: queue.SimpleQueue[tuple[Row, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        connection = sqlite3.connect(self.database, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(SCHEMA)
        while True:
            batch = [self.waiting.get()]
            while not self.waiting.empty():
                batch.append(self.waiting.get())
            connection.execute("BEGIN IMMEDIATE")
            for start in range(0, len(batch), 32):
                rows = [row for row, _ in batch[start : start + 32]]
                values = ", ".join(["(?, ?, ?, ?, ?)"] * len(rows))
                connection.execute(f"INSERT INTO traces VALUES {values}", list(itertools.chain.from_iterable(rows)))
            connection.execute("COMMIT")
            self.loop.call_soon_threadsafe(_call_all, [release for _, release in batch])


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


class Upstream(asyncio.Protocol):
    """A keep-alive connection to the upstream; passes received bytes to the client that uses it."""

    def __init__(self) -> None:
        self.client: Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        assert self.client is not None
        self.client.received(data)


class Client(asyncio.Protocol):
    """A connection of an agent, with one call in flight."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.request = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.request += data
        head, separator, body = self.request.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        self.request = b""
        self.id = f"chatcmpl-{os.urandom(16).hex()}"
        self.asked = orjson.loads(body)
        self.stream = bool(self.asked.get("stream"))
        self.rest, self.expected = b"", 0
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.held: list[bytes] = []
        if self.stream:
            self.transport.write(STREAM_HEAD)
        sent = orjson.dumps({**self.asked, "logprobs": True, "return_token_ids": True})
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: u\r\ncontent-length: %d\r\n\r\n" % len(sent)
        self.gateway.send(self, head + sent)

    def received(self, data: bytes) -> None:
        self.rest += data
        if self.stream:
            self.received_stream()
            return
        if not self.expected:
            head, _, body = self.rest.partition(b"\r\n\r\n")
            self.expected = len(head) + 4 + _content_length(head)
        if len(self.rest) < self.expected:
            return
        answer = orjson.loads(self.rest[self.rest.index(b"\r\n\r\n") + 4 :])
        answer["id"] = self.id
        self.prompt_ids = answer.pop("prompt_token_ids")
        [choice] = answer["choices"]
        self.take(choice)
        self.texts.append(choice["message"]["content"])
        body = orjson.dumps(answer)
        self.keep(HEAD % (len(body), body))

    def received_stream(self) -> None:
        # Every event is one `data: ` line, ended by an empty one; between events is the framing of HTTP chunks.
        *events, self.rest = self.rest.split(b"\n\n")
        pieces = []
        for event in events:
            payload = event[event.index(b"data: ") + 6 :]
            if payload == b"[DONE]":
                self.held.append(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                self.keep(b"".join(self.held))
                break
            chunk = orjson.loads(payload)
            chunk["id"] = self.id
            self.prompt_ids = chunk.pop("prompt_token_ids", None) or self.prompt_ids
            ends = not chunk["choices"]
            for choice in chunk["choices"]:
                self.take(choice)
                self.texts.append(choice["delta"].get("content", ""))
                ends = choice["finish_reason"] is not None
            (self.held if ends else pieces).append(_chunk(b"data: %s\n\n" % orjson.dumps(chunk)))
        self.transport.write(b"".join(pieces))

    def take(self, choice: dict[str, Any]) -> None:
        self.response_ids += choice.pop("token_ids", None) or ()
        if choice["logprobs"]:
            self.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            choice["logprobs"] = None

    def keep(self, ending: bytes) -> None:
        self.gateway.release(self)
        document = orjson.dumps([self.asked, "".join(self.texts)])
        ids = (array("I", self.prompt_ids).tobytes(), array("I", self.response_ids).tobytes())
        row = (self.id, *ids, array("f", self.logprobs).tobytes(), document)
        self.gateway.writer.waiting.put((row, lambda: self.transport.write(ending)))


class Gateway:
    """Pool of upstream connections, one for each concurrent call, and the writer."""

    def __init__(self, upstream_port: int, database: str) -> None:
        self.upstream_port = upstream_port
        self.idle: list[Upstream] = []
        self.used: dict[Client, Upstream] = {}
        self.loop = asyncio.get_running_loop()
        self.writer = Writer(database, self.loop)

    def send(self, client: Client, request: bytes) -> None:
        if self.idle:
            self.use(self.idle.pop(), client, request)
        else:
            task = self.loop.create_task(self.connect(client, request))
            task.add_done_callback(lambda done: done.result())

    async def connect(self, client: Client, request: bytes) -> None:
        _, upstream = await self.loop.create_connection(Upstream, "127.0.0.1", self.upstream_port)
        self.use(upstream, client, request)

    def use(self, upstream: Upstream, client: Client, request: bytes) -> None:
        self.used[client] = upstream
        upstream.client = client
        upstream.transport.write(request)

    def release(self, client: Client) -> None:
        self.idle.append(self.used.pop(client))


def _content_length(head: bytes) -> int:
    at = head.lower().index(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0])


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(upstream_port: int, database: str) -> None:
    gateway = Gateway(upstream_port, database)
    server = await asyncio.get_running_loop().create_server(lambda: Client(gateway), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
