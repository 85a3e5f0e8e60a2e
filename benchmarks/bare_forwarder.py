"""The leanest forwarder: it passes bytes from clients to an upstream and back, and parses nothing.

    python benchmarks/bare_forwarder.py UPSTREAM_PORT

Its cost is the minimum of any gateway: `benchmarks/gateway_scaling.py` shows it beside ours.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop


class End(asyncio.Protocol):
    """One end of a connection; received bytes are sent to the other."""

    other: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Client(End):
    """Connection of a client, which gets its own connection to the upstream."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connecting = asyncio.get_running_loop().create_task(self.connect())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    async def connect(self) -> None:
        _, self.other = await asyncio.get_running_loop().create_connection(End, "127.0.0.1", self.upstream_port)
        self.other.other = self
        self.other.transport.write(b"".join(self.early))


async def serve(upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(upstream_port), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
