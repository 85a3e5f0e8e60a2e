"""Recording of model calls: stamp a request with its session, and record the answer there.

Requests and responses come from `httpx` or `httpx2` (used by openai >= 3). The answer is copied as it passes and
parsed at the end, so a streaming caller receives every byte when it arrives.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from rllm.capture.chat import traces_from_chat
from rllm.capture.side_calls import OWN_KEY, PROGRAM_KEY
from rllm.capture.stream import ChatStream, SSEDecoder
from rllm.capture.wire_formats import model_call_in
from rllm.sdk.context import Call, Frame
from rllm.telemetry import outgoing_headers
from rllm.types import JSONMapping, JSONObject

if TYPE_CHECKING:
    from httpx import Request, Response

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-rllm-session"
METADATA_HEADER = "x-rllm-metadata"
MAX_METADATA_BYTES = 4096
"""Longer metadata is not sent, because servers limit headers."""

_EXCHANGE = "rllm.exchange"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Model call in progress."""

    frame: Frame
    call: Call
    request_body: bytes
    started_at: float = field(default_factory=time.time)

    def complete(self, answer: JSONMapping) -> None:
        """Fill the call that was reserved in the session with the traces of the answer."""
        self.call.traces = traces_from_chat(
            json.loads(self.request_body),
            answer,
            session_id=self.frame.name,
            started_at=self.started_at,
            timings={"total_s": time.time() - self.started_at},
            metadata={**self.frame.metadata, OWN_KEY: self.frame.uids},
        )


def is_model_call(method: str, path: str) -> bool:
    """Return whether a request samples from a model, in any wire format."""
    return method == "POST" and model_call_in(path) is not None


def begin(request: Request, frame: Frame, *, stamp: bool) -> None:
    """Register a request that is about to be sent: reserve its place in the session, and stamp it if wanted."""
    if _EXCHANGE in request.extensions:  # a redirect, or a patched client with hooks of its own
        return
    if stamp:
        inherited = request.headers.get(METADATA_HEADER, "")  # from the environment: see `propagation.environment`
        for name, value in stamps(frame, request.url.path, inherited).items():
            request.headers[name] = value
    if request.url.path.endswith("/chat/completions"):
        try:
            body = bytes(request.content)
        except RuntimeError:  # a streamed body, which no model client sends
            body = b"{}"
        request.extensions[_EXCHANGE] = Exchange(frame=frame, call=frame.reserve_call(), request_body=body)


def finish(response: Response) -> None:
    """Record the answer to a registered request: now if it has been read, otherwise when it is closed."""
    exchange = response.request.extensions.get(_EXCHANGE)
    if exchange is None or response.has_redirect_location:
        return
    del response.request.extensions[_EXCHANGE]
    if not response.is_success:  # an error is not an answer
        return
    if response.is_closed:
        _record(exchange, response, response.content)
    else:
        stream: Any = response.stream
        kind: Any = type(stream)
        response.stream = _watched_class(kind)(stream, lambda raw: _record(exchange, response, _decoded(response, raw)))


def stamps(frame: Frame, path: str, inherited: str = "") -> dict[str, str]:
    """Return the headers that identify a call's session; `inherited` is the metadata header of the parent process."""
    headers = {METADATA_HEADER: metadata_stamp(frame, inherited), **outgoing_headers()}
    if "/sessions/" not in path:  # a URL that names the session takes precedence
        headers[SESSION_HEADER] = frame.name
    return headers


def metadata_stamp(frame: Frame, inherited: str = "", *, of_program: bool = False) -> str:
    """Return the metadata header of calls made here: percent-encoded JSON, merged with inherited metadata.

    `of_program` marks calls that a program by another author may have made.
    """
    around = read_stamp(inherited)
    around.pop(PROGRAM_KEY, None)  # a client that adds stamps itself was made by the agent's author
    needed: JSONObject = {OWN_KEY: [*around.get(OWN_KEY, []), *frame.uids]}
    if of_program:
        needed[PROGRAM_KEY] = True
    metadata = {**around, **frame.metadata}
    try:
        text = json.dumps({**metadata, **needed}, default=str, allow_nan=False)
    except (TypeError, ValueError):  # keys that are not strings, NaN, a cycle
        text = json.dumps({**{str(key): str(value) for key, value in metadata.items()}, **needed})
    if "\\ud" in text:  # half of a surrogate pair, as in file names, is not valid text for readers
        text = json.dumps(json.loads(json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")))
    if len(text) > MAX_METADATA_BYTES:
        _warn_of_long_metadata()
        text = json.dumps(needed)
    return quote(text, safe='{}[]:,"')


@functools.cache
def _warn_of_long_metadata() -> None:  # once
    logger.warning("a session's metadata is longer than %d bytes and is not stored with its calls", MAX_METADATA_BYTES)


def read_stamp(stamp: str) -> JSONObject:
    """Return the metadata of our stamp; empty for a header from elsewhere."""
    try:
        metadata = json.loads(unquote(stamp)) if stamp else {}
    except ValueError:
        return {}
    known = isinstance(metadata, dict) and isinstance(metadata.get(OWN_KEY, []), list)
    return metadata if known else {}


def _record(exchange: Exchange, response: Response, body: bytes) -> None:
    try:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            stream = ChatStream()
            for event in SSEDecoder().feed(body):
                if event != b"[DONE]":
                    stream.feed(json.loads(event))
            answer = stream.response()
            if not answer["choices"]:  # the stream ended before its first choice
                return
        else:
            answer = json.loads(body)
        exchange.complete(answer)
    except Exception:  # the caller must get its answer even if it cannot be recorded
        logger.exception("the answer of %s could not be recorded", response.request.url)


def _decoded(response: Any, raw: bytes) -> bytes:
    """Return the body without its content encoding, using the library's own decoders."""
    if "content-encoding" not in response.headers:
        return raw
    return bytes(type(response)(response.status_code, headers=response.headers, content=raw).content)


class _Watched:
    """Byte stream that collects what passes and reports it once, when it is closed."""

    def __init__(self, stream: Any, on_close: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._on_close = on_close
        self._chunks: list[bytes] = []
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._chunks.append(chunk)
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._chunks.append(chunk)
            yield chunk

    def close(self) -> None:
        self._stream.close()
        self._report()

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._report()

    def _report(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(b"".join(self._chunks))


@functools.cache
def _watched_class(stream: type[Any]) -> Any:
    """Return a class that is also an instance of the library's stream interfaces, as the library requires."""
    interfaces = (base for base in stream.__mro__ if base.__name__ in ("SyncByteStream", "AsyncByteStream"))
    return type("WatchedStream", (_Watched, *interfaces), {})


def same_origin(url: str, other: str) -> bool:
    """Return whether two URLs lead to the same server; all names of the loopback interface count as equal."""
    return _origin(url) == _origin(other)


@functools.lru_cache(maxsize=256)
def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = "127.0.0.1" if host in ("localhost", "::1") else host
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
