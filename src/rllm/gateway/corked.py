"""One write to the socket for all that is written at once: the head of an answer and its body, its last piece and its end.

A server writes each as it is told, and every write is a system call that wakes the client, at a price of many parsed events.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rllm.gateway.plain_http import PlainHTTP


class CorkedHTTP(PlainHTTP):
    """An HTTP protocol on a transport that collects what is written until the event loop goes on."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", _Corked(transport)))


class _Corked:
    """A transport; everything but writing is the real one's."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        written, self._written = self._written, []
        if written and not self._transport.is_closing():
            self._transport.write(b"".join(written))
