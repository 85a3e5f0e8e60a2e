"""What the server below makes wrong of HTTP/1: bodies behind an offer to speak another protocol, and answers to HTTP/1.0.

A server may pass over an offer (RFC 9110, section 7.8). Java's HttpClient makes one, of HTTP/2, with its first request on each
connection; the parser leaves all behind the head of such a request to the other protocol, so that the body would be lost.
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PlainHTTP(HttpToolsProtocol):
    """Uvicorn's HTTP protocol that speaks nothing else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._told: list[tuple[bytes, bytes]] = []
        """What the application is told of the offer of the request that is read again."""

    def on_headers_complete(self) -> None:
        if self._is_offer():
            return
        self.headers += self._told
        self._told = []
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # which knows no chunks: the end of the connection ends an answer
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()

    def on_message_complete(self) -> None:
        if not self._is_offer():
            super().on_message_complete()

    def pass_over_offer(self, rest: bytes) -> None:
        """Read the request as if it had made no offer; `rest` is what came behind its head."""
        if not self._is_offer():  # a CONNECT, which was answered
            return
        # Without a WebSocket such a request has no meaning, so its client must hear that there are none.
        self._told = [
            header for header in self.headers if header[0] == b"upgrade" and header[1].lower() == b"websocket"
        ]
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s\r\n" % (method, self.url, version)]
        head += [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _Parser(self)  # the former one may be at the end of its connection
        self.parser.feed_data(b"".join([*head, b"\r\n", rest]))

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and b"upgrade" in dict(self.headers)


class _Parser(httptools.HttpRequestParser):
    def __init__(self, protocol: PlainHTTP) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._protocol.pass_over_offer(data[upgrade.args[0] :])


class _AnyLength(int):
    """How long a body is to be that may have any length."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self
