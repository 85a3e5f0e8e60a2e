"""Stamp a model call with the session it is made in, and record its answer there.

Written for requests and responses of `httpx` and of `httpx2` (which openai >= 3 uses) alike, whence `Any`. The answer is
watched as it passes and read from it at the end, so a caller that streams sees every byte when it arrives.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from rllm.capture.chat import traces_from_chat
from rllm.capture.side_calls import OWN_KEY, PROGRAM_KEY
from rllm.capture.stream import ChatStream, SSEDecoder
from rllm.capture.wire_formats import model_call_in
from rllm.sdk.context import Call, Frame
from rllm.telemetry import outgoing_headers

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-rllm-session"
METADATA_HEADER = "x-rllm-metadata"
MAX_METADATA_BYTES = 4096
"""Metadata whose JSON is longer stays on this side: headers have limits, and servers differ in them."""

RECORDED_CALLS = ("/chat/completions",)

_EXCHANGE = "rllm.exchange"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A model call that is under way."""

    frame: Frame
    call: Call
    request_body: bytes
    started_at: float = field(default_factory=time.time)

    def complete(self, answer: Mapping[str, Any]) -> None:
        """Fill the place that was reserved for this call."""
        self.call.traces = traces_from_chat(
            json.loads(self.request_body),
            answer,
            session_id=self.frame.name,
            started_at=self.started_at,
            timings={"total_s": time.time() - self.started_at},
            metadata=stamped_metadata(self.frame),
        )


def is_model_call(method: str, path: str) -> bool:
    """Return whether this request samples from a model, in any wire format."""
    return method == "POST" and model_call_in(path) is not None


def begin(request: Any, frame: Frame, *, stamp: bool) -> None:
    """Take note of a request that is about to leave: reserve its place in the session, and stamp it if wanted."""
    if _EXCHANGE in request.extensions:  # a redirect, or a patched client with hooks of its own
        return
    if stamp:
        inherited = request.headers.get(METADATA_HEADER, "")  # from the environment: see `propagation.environment`
        for name, value in stamps(frame, request.url.path, inherited).items():
            request.headers[name] = value
    if request.url.path.endswith(RECORDED_CALLS):
        body = _body_of(request)
        request.extensions[_EXCHANGE] = Exchange(frame=frame, call=frame.reserve_call(), request_body=body)


def finish(response: Any) -> None:
    """Record the answer to a request that `begin` took note of: now if it was read, else when it has been."""
    exchange = response.request.extensions.get(_EXCHANGE)
    if exchange is None or response.has_redirect_location:
        return
    del response.request.extensions[_EXCHANGE]
    if not response.is_success:  # an error is not an answer
        return
    if response.is_closed:
        _record(exchange, response, response.content)
    else:
        response.stream = _watched(response.stream, lambda raw: _record(exchange, response, _decoded(response, raw)))


def stamps(frame: Frame, path: str, inherited: str = "") -> dict[str, str]:
    """The headers that tell a gateway whose call this is; `inherited` is the metadata header of the process around."""
    headers = {METADATA_HEADER: metadata_stamp(frame, inherited), **outgoing_headers()}
    if "/sessions/" not in path:  # a URL that names the session needs no header, and may know better
        headers[SESSION_HEADER] = frame.name
    return headers


def metadata_stamp(frame: Frame, inherited: str = "", *, of_program: bool = False) -> str:
    """The metadata header of calls made here: percent-encoded JSON, with what was inherited around it.

    `of_program` says that calls with this header may be those of a program that nobody here wrote.
    """
    around = read_stamp(inherited)
    around.pop(PROGRAM_KEY, None)  # whose clients stamp by themselves is not merely told to
    needed: dict[str, Any] = {OWN_KEY: [*around.get(OWN_KEY, []), *frame.uids]}
    if of_program:
        needed[PROGRAM_KEY] = True
    metadata = _json_of({**around, **frame.metadata}, needed)
    if len(metadata) > MAX_METADATA_BYTES:
        _warn_once_that_metadata_stays(MAX_METADATA_BYTES)
        metadata = json.dumps(needed)
    return quote(metadata, safe='{}[]:,"')


def read_stamp(stamp: str) -> dict[str, Any]:
    """The metadata of a stamp of ours; nothing if somebody else wrote it."""
    try:
        metadata = json.loads(unquote(stamp)) if stamp else {}
    except ValueError:
        return {}
    known = isinstance(metadata, dict) and isinstance(metadata.get(OWN_KEY, []), list)
    return metadata if known else {}


def stamped_metadata(frame: Frame) -> dict[str, Any]:
    """What a call's trace tells about the sessions it was made in."""
    return {**frame.metadata, OWN_KEY: frame.uids}


@functools.cache
def _warn_once_that_metadata_stays(limit: int) -> None:
    logger.warning(
        "a session's metadata is longer than %d bytes: it stays in this process and is not stored with the calls", limit
    )


def _json_of(metadata: Mapping[str, Any], needed: Mapping[str, Any]) -> str:
    try:
        told = json.dumps({**metadata, **needed}, default=str, allow_nan=False)
    except (TypeError, ValueError):  # keys that are no strings, NaN, a cycle
        told = json.dumps({**{str(key): str(value) for key, value in metadata.items()}, **needed})
    if "\\ud" in told:  # half of a surrogate pair, as in names of files, is no text to whoever reads this
        told = json.dumps(json.loads(json.dumps(json.loads(told), ensure_ascii=False).encode(errors="replace")))
    return told


def _body_of(request: Any) -> bytes:
    try:
        return bytes(request.content)
    except RuntimeError:  # a body that is sent as a stream, which no model client does
        return b"{}"


def _record(exchange: Exchange, response: Any, body: bytes) -> None:
    try:
        answer = _answer_of(body, is_stream=response.headers.get("content-type", "").startswith("text/event-stream"))
        if answer is not None:
            exchange.complete(answer)
    except Exception:  # the caller has its answer; what cannot be recorded must not take it away
        logger.exception("the answer of %s could not be recorded", response.request.url)


def _answer_of(body: bytes, *, is_stream: bool) -> Mapping[str, Any] | None:
    """The chat completion in a response's body; `None` where a stream ended before its first choice."""
    if not is_stream:
        answer: Mapping[str, Any] = json.loads(body)
        return answer
    stream = ChatStream()
    for event in SSEDecoder().feed(body):
        if event != b"[DONE]":
            stream.feed(json.loads(event))
    answer = stream.response()
    return answer if answer["choices"] else None


def _decoded(response: Any, raw: bytes) -> bytes:
    """The body without its content encoding, by the library's own decoders."""
    if "content-encoding" not in response.headers:
        return raw
    return bytes(type(response)(response.status_code, headers=response.headers, content=raw).content)


class _Watched:
    """A byte stream that remembers what passes and reports it once, when it is closed."""

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


def _watched(stream: Any, on_close: Callable[[bytes], None]) -> _Watched:
    interfaces = tuple(base for base in type(stream).__mro__ if base.__name__ in ("SyncByteStream", "AsyncByteStream"))
    watched: _Watched = _watched_class(interfaces)(stream, on_close)
    return watched


@functools.cache
def _watched_class(interfaces: tuple[type, ...]) -> type:
    """The library insists that a stream is an instance of its own interface."""
    return type("WatchedStream", (_Watched, *interfaces), {})


def same_origin(url: str, other: str) -> bool:
    """Whether two URLs lead to the same server; the names of the loopback interface are equal."""
    return _origin(url) == _origin(other)


@functools.lru_cache(maxsize=256)
def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = "127.0.0.1" if host in ("localhost", "::1") else host
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
