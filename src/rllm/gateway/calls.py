"""Endpoint of model calls: from an ASGI request to the core and back, in one dialect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from starlette.types import Receive, Scope, Send

from rllm import telemetry
from rllm._runtime.ids import new_id
from rllm._runtime.untrusted import LARGE
from rllm.capture import side_call
from rllm.capture.side_calls import is_own
from rllm.errors import ConfigError, StoreError
from rllm.gateway.call_dedup import InFlightCall, InFlightCalls, RetryKey, retry_key
from rllm.gateway.config import GatewayConfig
from rllm.gateway.core import Gateway, ModelCall
from rllm.gateway.dialects import Dialect, StreamEncoder
from rllm.gateway.errors import DeclinedError, GatewayError, to_gateway_error
from rllm.gateway.http_limits import BodyBudget, ClientDisconnected, keep_alive, read_body, until_disconnect
from rllm.gateway.identity import (
    SESSION_HEADER,
    caller_of,
    check_one_named,
    metadata_of,
    named_by_any_means,
    session_named,
    trace_context_of,
)
from rllm.gateway.sessions import Sessions, SessionState, is_session_id
from rllm.gateway.upstream.base import IGNORED_HEADER
from rllm.inference.parameters import log_ignored, printable
from rllm.types import SIDE_CALL_KEY, JSONMapping, JSONObject, Trace

_CLIENT_LEFT = 499  # As nginx logs it; no client ever reads this status.
_MAX_NAMED = 40
_SUB_AGENT_HEADERS = (b"x-claude-code-agent-id", b"x-parent-session-id")
"""Headers by which programs name the sub-agent that calls, and the session that it belongs to."""


@dataclass(frozen=True, slots=True)
class CallEndpoint:
    """Endpoint of one route; a plain ASGI application, because this is the hot path."""

    gateway: Gateway
    sessions: Sessions
    config: GatewayConfig
    budget: BodyBudget
    """Limit on the bodies of all running requests."""
    dialect: Dialect
    counts: bool = False
    """True if calls are answered with the number of tokens of their prompts."""
    in_flight: InFlightCalls = field(default_factory=InFlightCalls)
    """Calls of this route whose answers may be requested again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self.gateway.metrics
        answer = _Answer(send, self.dialect)
        mode, started = "json", time.perf_counter()
        metrics.in_flight += 1
        try:
            call, asked, retry = await self._call(scope, receive, answer)
            answer.ignored = self._ignored(call, asked)
            if self.counts:
                mode = "count"
                async with until_disconnect(scope):
                    num_tokens = await self.gateway.count_tokens(call)
                await answer.whole(200, self.dialect.render_count(num_tokens))
            elif call.asked.get("stream"):
                mode = "stream"
                await self._stream(call, self.dialect.encoder(asked=asked), scope, answer, retry)
            else:
                await self._complete(call, asked, scope, answer, retry)
        except ClientDisconnected:
            answer.status = _CLIENT_LEFT
        except Exception as error:
            shown = self._in_own_words(to_gateway_error(error))
            await answer.whole(shown.status, self.dialect.render_error(shown), more=shown.headers())
        finally:
            metrics.in_flight -= 1
            self.budget.release(scope)
            metrics.observe(self.dialect.wire.name, mode, answer.status, time.perf_counter() - started)
            if answer.call is not None:
                self.sessions.update_size(answer.call.session)
            if self.config.otel and answer.call is not None:
                record = partial(self._record_span, mode=mode, status=answer.status)
                if answer.call.traces:
                    record(answer.call)
                else:  # its client has left, or it is a retry, which has no span
                    answer.call.on_durable = record

    def _in_own_words(self, error: GatewayError) -> GatewayError:
        """Return an error that names a chat field as the dialect does."""
        own = self.dialect.parameters.own_names.get(error.param or "")
        if error.param is None or own is None:
            return error
        message = str(error).replace(error.param, own, 1)
        return GatewayError(error.status, message, code=error.code, param=own.partition("[")[0])

    def _ignored(self, call: ModelCall, asked: JSONMapping) -> list[str]:
        """Return the fields of a request that have no effect, as its dialect names them; each is logged once."""
        of_dialect, of_upstream = self.dialect.left_out(asked), self.gateway.upstream.ignored(call.asked)
        if not (of_dialect or of_upstream):
            return []
        own_names = self.dialect.parameters.own_names
        log_ignored(of_dialect)
        log_ignored(of_upstream, own_names)
        return [*of_dialect, *(own_names.get(key, key) for key in of_upstream)]

    def _record_span(self, call: ModelCall, mode: str, status: int) -> None:
        """Record a call, whose traces are durable, as a span: a child of its W3C headers' span, or of its session's."""
        broken = [trace.finish_reason for trace in call.traces if trace.finish_reason in ("abort", "error")]
        telemetry.record_call(
            call.traces,
            operation="text_completion" if self.dialect.wire.name == "completions" else "chat",
            error_type=str(status) if status >= 400 else next(iter(broken), None),
            headers=call.trace_context or call.session.trace_context,
            attributes={"rllm.dialect": self.dialect.wire.name, "rllm.stream": mode == "stream"},
        )

    async def _call(
        self, scope: Scope, receive: Receive, answer: _Answer
    ) -> tuple[ModelCall, JSONObject, RetryKey | None]:
        """Return the request as a call of a session, the request as its client wrote it, and its retry key.

        Once the caller is known, a request that is refused for its content leaves a trace, like a call that fails
        later.
        """
        _check_method(scope)
        headers, path = dict(scope["headers"]), scope["path_params"].get("session_id")
        try:
            caller = await caller_of(path, headers, self.config, self.sessions)
        except GatewayError:
            if named_by_any_means(path, headers) is None:
                self.sessions.unattributed.note(scope, headers, is_refused=True)
            raise
        # During rollouts, the name of a session that the client invented is ignored.
        takes_own = self.sessions.unattributed.session_id is None
        named = session_named(path, headers, caller, takes_own=takes_own)
        asked: JSONObject = {}
        metadata: JSONObject = {}
        try:
            body = await read_body(scope, receive, self.config, self.budget)
            metadata = metadata_of(headers)
            if named is None and not self.counts:
                metadata |= self.sessions.unattributed.note(scope, headers)
            # A large body is parsed in a thread, so that other calls do not have to wait.
            parse = partial(self.dialect.parse, body, scope["path_params"])
            asked = parse() if len(body) < LARGE else await asyncio.to_thread(parse)
            check_one_named(path, headers)
            call = answer.call = await self._call_of(asked, named, headers, metadata)
        except DeclinedError:
            raise
        except (GatewayError, ConfigError) as error:
            if not self.counts:
                with suppress(StoreError):  # Its session cannot be read.
                    answer.call = await self._refused(asked, named, headers, metadata, error)
            raise
        return call, asked, retry_key(headers, call.session if named else None, body)

    async def _call_of(
        self, asked: JSONObject, named: str | None, headers: Mapping[bytes, bytes], metadata: JSONObject
    ) -> ModelCall:
        """Return a request as a call of the named session, or of a new one.

        Raises:
            GatewayError: if it is malformed, or refers to an answer that does not exist.
            ConfigError: if no session can have this name.
        """
        session_id = named
        earlier: Mapping[str, Trace] = {}
        if refers_to := self.dialect.refers_to(asked):
            session_id = named or self.sessions.session_of_answer(refers_to[0])
            earlier = await self._answers(session_id, refers_to)
        chat = self.dialect.to_chat(asked, earlier)
        metadata = {**metadata, **self.dialect.trace_metadata(asked)}
        session = await self.sessions.get(session_id) if session_id else self.sessions.fresh()
        metadata = {**_call_metadata(chat, session, headers, is_own=is_own(metadata)), **metadata}
        call = ModelCall(
            asked=chat,
            prompt_ids=self.dialect.prompt_ids(asked),
            session=session,
            metadata=metadata,
            trace_context=trace_context_of(headers),
            id=self.dialect.id_prefix + new_id(),
        )
        if self.dialect.continues_answers and not named:
            self.sessions.remember_answer(call.id, session.id)
        return call

    async def _refused(
        self,
        asked: JSONMapping,
        named: str | None,
        headers: Mapping[bytes, bytes],
        metadata: JSONMapping,
        error: Exception,
    ) -> ModelCall:
        """Return a call that stands for a refused request, with the trace of its failure."""
        model = asked.get("model")
        call = ModelCall(
            asked={"model": model if isinstance(model, str) else "", "messages": []},
            session=await self.sessions.get(named) if named and is_session_id(named) else self.sessions.fresh(),
            metadata=metadata,
            trace_context=trace_context_of(headers),
            id=self.dialect.id_prefix + new_id(),
        )
        await self.gateway.refuse(call, error)
        return call

    async def _answers(self, session_id: str | None, ids: Sequence[str]) -> Mapping[str, Trace]:
        """Return the traces of these answers that the session has."""
        if session_id is None:
            return {}
        found = [await asyncio.to_thread(self.gateway.store.trace, session_id, trace_id) for trace_id in ids]
        return {trace.id: trace for trace in found if trace is not None}

    async def _complete(
        self, call: ModelCall, asked: JSONObject, scope: Scope, answer: _Answer, retry: RetryKey | None
    ) -> None:
        if earlier := self.in_flight.join(retry):
            await answer.whole(200, await self._joined(earlier, retry, scope))
            return
        with InFlightCall() as own:
            async with until_disconnect(scope, partial(self.in_flight.client_gone, retry, own)):
                body = await self.gateway.complete(call, partial(self.dialect.render, asked=asked))
            own.answer.set_result(body)
            if not own.is_client_gone:
                self.in_flight.offer(retry, own)  # Its client may be timing out just now.
        await answer.whole(200, body)

    async def _stream(
        self, call: ModelCall, encoder: StreamEncoder, scope: Scope, answer: _Answer, retry: RetryKey | None
    ) -> None:
        with keep_alive(answer.piece, encoder.keep_alive, self.config.keep_alive_s) as spoken:
            try:
                if earlier := self.in_flight.join(retry):
                    await answer.piece(await self._joined(earlier, retry, scope))
                else:
                    await self._stream_first(call, encoder, scope, answer, retry, spoken)
            except ClientDisconnected:
                raise
            except Exception as error:
                if not answer.began:
                    raise
                await answer.piece(encoder.fail(to_gateway_error(error)))
        await answer.end()

    async def _stream_first(
        self,
        call: ModelCall,
        encoder: StreamEncoder,
        scope: Scope,
        answer: _Answer,
        retry: RetryKey | None,
        spoken: Callable[[], None],
    ) -> None:
        """Make the call and pass its pieces on, or collect them if the client left before it had any."""
        collected: list[bytes] = []
        with InFlightCall() as own:

            def continues(cut: Callable[[], None]) -> bool:
                return not answer.began and self.in_flight.client_gone(retry, own, cut)

            leaves = until_disconnect(scope, continues)
            async with leaves, aclosing(self.gateway.stream(call, encoder)) as pieces:
                async for piece in pieces:
                    spoken()
                    if own.is_client_gone:
                        collected.append(piece)
                    else:
                        await answer.piece(piece)
            if collected:
                own.answer.set_result(b"".join(collected))

    async def _joined(self, earlier: InFlightCall, retry: RetryKey | None, scope: Scope) -> bytes:
        """Return the answer of the earlier call that a request repeats."""
        async with until_disconnect(scope):
            try:
                return await asyncio.shield(earlier.answer)
            except asyncio.CancelledError:
                if not self.in_flight.offer(retry, earlier):
                    earlier.cancel()
                raise


def _check_method(scope: Scope) -> None:
    if scope["method"] == "POST":
        return
    if b"upgrade" in dict(scope["headers"]):
        raise GatewayError(426, f"{scope['path']}: WebSockets are not supported: use POST", code="upgrade_required")
    raise GatewayError(405, f"{scope['method']} {scope['path']}: use POST", code="method_not_allowed", allow="POST")


def _call_metadata(
    chat: JSONMapping, session: SessionState, headers: Mapping[bytes, bytes], *, is_own: bool
) -> JSONObject:
    """Return the metadata of a call: its sub-agent, and the reason if it is a side call. Usually empty.

    Args:
        chat: its request. The session remembers whether any of its calls had tools.
        session: its session.
        headers: headers of its HTTP request.
        is_own: True if the author's own code made it.
    """
    metadata: JSONObject = {
        name.decode(): headers[name].decode("latin-1") for name in _SUB_AGENT_HEADERS if name in headers
    }
    if reason := side_call(chat, session_has_tools=session.has_tools, is_own=is_own):
        metadata[SIDE_CALL_KEY] = reason
    elif chat.get("tools"):
        session.has_tools = True
    return metadata


class _Answer:
    """ASGI response of one call."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self.call: ModelCall | None = None
        """The call, once it is known; the head names its session."""
        self.ignored: Sequence[str] = ()
        """Fields of the request that have no effect."""
        self.status = 500
        self.began = False

    async def whole(self, status: int, body: bytes, *, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """Send a whole answer; `more` are further headers."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def piece(self, piece: bytes) -> None:
        if not self.began:
            media_type = self._dialect.stream_type.encode()
            await self._start(200, [(b"content-type", media_type), (b"cache-control", b"no-cache")])
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.call is not None:
            headers.append((SESSION_HEADER.encode(), self.call.session.id.encode()))
            if named := self._named():
                headers.append((IGNORED_HEADER.encode(), named.encode()))
        self.status = status
        self.began = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _named(self) -> str:
        """Return the fields that have no effect here or upstream, for a header."""
        assert self.call is not None
        if not (self.ignored or self.call.route.ignored or self.call.lost):
            return ""
        names = self._dialect.parameters.own_names
        upstream = (names.get(key, key) for key in self.call.route.ignored.split(", ") if key)
        lost = (f"prompt.{kind.replace(' ', '_')}" for kind in self.call.lost)
        return ", ".join([*dict.fromkeys(map(printable, [*self.ignored, *upstream, *lost]))][:_MAX_NAMED])
