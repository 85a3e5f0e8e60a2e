"""An OpenAI-compatible server as upstream, over HTTP."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import orjson

from rllm._runtime.untrusted import LARGE
from rllm.capture import PriorAnswer, SSEDecoder
from rllm.errors import ConfigError
from rllm.gateway.errors import CONTEXT_OVERFLOW, UpstreamError
from rllm.gateway.upstream.answers import (
    check_answer,
    check_models,
    json_object,
    parse_events,
    parse_plain_answer,
    refusal_of,
    start_of,
    without_error,
)
from rllm.gateway.upstream.base import FACTS_KEY, IGNORED_HEADER, UpstreamCall
from rllm.gateway.upstream.connection import (
    MAX_ANSWER_BYTES,
    MAX_STREAM_BYTES,
    Connection,
    HTTPConnections,
    TooLongError,
    UnreachableError,
)
from rllm.gateway.upstream.token_prompts import (
    CompletionChunks,
    TokenPrompts,
    chat_answer,
    completion_request,
    for_template,
)
from rllm.types import JSONMapping, JSONObject, Message

UpstreamKind: TypeAlias = Literal["vllm", "openai"]
"""`vllm`: takes fields beyond OpenAI's, and returns token ids when asked. `openai`: rejects fields it does not know."""

_EXPLICIT: dict[UpstreamKind, JSONObject] = {
    # Every parameter that a model's generation_config.json may change on the server, at its neutral value.
    "vllm": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "openai": {"temperature": 1.0, "top_p": 1.0},
}

_DONE = b"[DONE]"
_MAX_MODELS_BYTES = 8 * LARGE
_MIN_KEY_LENGTH = 8
"""Length from which a key is treated as a secret: servers without keys are given words such as `EMPTY`."""
_NOT_IN_URLS = re.compile(r"[^!-~]|[\\\"<>^`{|}]")
_ID_PREFIX = re.compile(r"\A(?:chatcmpl-|cmpl-|resp_|msg_)")
"""Prefixes of the dialects for a call's id."""


class HTTPUpstream:
    """An OpenAI-compatible server. The default kind suits vLLM, SGLang and `rllm serve`."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        kind: UpstreamKind = "vllm",
        tokens: TokenPrompts | None = None,
        facts: JSONMapping | None = None,
        check_ready: Callable[[], None] = lambda: None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 600.0,
        total_timeout_s: float = 3600.0,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            base_url: up to and including `/v1`, which is added to a URL without a path.
            api_key: the server's key, if it needs one.
            model: replaces the model that agents ask for; `None` passes theirs on.
            kind: which fields the server takes.
            tokens: the served model's tokenizer, with which later turns continue the sampled tokens; `None` leaves
                their rendering to the server.
            facts: facts about every answer that the server does not report itself, see `FACTS_KEY`.
            check_ready: raises an `UpstreamError` while no calls may go to the server.
            connect_timeout_s: bound on connecting.
            read_timeout_s: bound on the server's silence, the time until its first byte included.
            total_timeout_s: bound on a whole call.

        Raises:
            ConfigError: if the URL is not a web address.
        """
        self.base_url = normalized_base_url(base_url)
        self._model = model
        self._kind: UpstreamKind = kind
        self._tokens = tokens
        self._headers = {"content-type": "application/json"}
        self._facts = {FACTS_KEY: dict(facts)} if facts else {}
        self._check_ready = check_ready
        key = api_key.encode() if api_key and len(api_key) >= _MIN_KEY_LENGTH else b""
        self._key_forms = {key, key.replace(b"/", b"\\/")} - {b""}
        """The key as text and in JSON: some servers repeat it in answers, which are shown and stored."""
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._connections = HTTPConnections(
            self.base_url,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            total_timeout_s=total_timeout_s,
        )

    def prepare(self, request: JSONMapping) -> JSONObject:
        given = {name: value for name, value in request.items() if value is not None}
        sent = {**_EXPLICIT[self._kind], **given, "logprobs": True}
        if self._kind == "vllm":
            sent["return_token_ids"] = True
        else:
            sent.pop("return_token_ids", None)
        if sent.get("stream"):
            sent["stream_options"] = {**(given.get("stream_options") or {}), "include_usage": True}
        if self._model:
            sent["model"] = self._model
        return sent

    def ignored(self, request: JSONMapping) -> Sequence[str]:
        return ()

    def continued_prompt(self, request: JSONMapping, prior: PriorAnswer) -> Sequence[int] | None:
        return None if self._tokens is None else self._tokens.continued(request, prior)

    def lost(self, messages: Sequence[Message], tools: Sequence[JSONMapping] | None = None) -> tuple[str, ...]:
        return () if self._tokens is None else self._tokens.lost(messages, tools)

    async def complete(self, call: UpstreamCall) -> JSONObject:
        self._check_ready()
        answer, body = await self._whole(self._chat(call), MAX_ANSWER_BYTES)
        call.route.ignored = answer.headers.get(IGNORED_HEADER, "")
        if answer.status != 200 and (shorter := _without_limit(call, answer.status, body)):
            return await self.complete(shorter)
        read = partial(_read_answer, call, answer.status, body, answer.headers)
        # A large answer is read in a thread, so that other calls do not have to wait.
        parsed = {**(read() if len(body) < LARGE else await asyncio.to_thread(read)), **self._facts}
        chunks = self._completion_chunks(call)
        return parsed if chunks is None else chat_answer(parsed, chunks)

    async def stream(self, call: UpstreamCall) -> AsyncGenerator[list[JSONObject], None]:
        self._check_ready()
        decoder = SSEDecoder()
        num_read = num_unread = 0
        is_done = False
        completion = self._completion_chunks(call)
        try:
            answer = await self._chat(call)
            try:
                shorter = await self._refused(call, answer)
                call.route.ignored = answer.headers.get(IGNORED_HEADER, "")
                while shorter is None and not is_done and (received := await answer.read_some()):
                    events = [*map(self._without_key, decoder.feed(received))]
                    if is_done := _DONE in events:
                        del events[events.index(_DONE) :]  # some proxies send more, and clients read no further either
                    num_read += len(received)
                    num_unread += len(received)
                    if num_unread > MAX_ANSWER_BYTES:
                        raise TooLongError(f"its stream holds an event of more than {MAX_ANSWER_BYTES:,} bytes")
                    if num_read > MAX_STREAM_BYTES:
                        raise TooLongError(f"its stream is longer than {MAX_STREAM_BYTES:,} bytes")
                    if events:
                        parse = partial(parse_events, events, logprob_details=call.logprob_details)
                        chunks = parse() if num_unread < 2 * LARGE else await asyncio.to_thread(parse)
                        num_unread = 0
                        without_error(chunks)[0].update(self._facts)
                        yield chunks if completion is None else [completion.feed(chunk) for chunk in chunks]
                if is_done:
                    await answer.pass_over_rest()
            finally:
                self._connections.release(answer)
        except OSError as error:
            raise self._named(error) from error
        if shorter is not None:
            async with aclosing(self.stream(shorter)) as batches:
                async for batch in batches:
                    yield batch

    async def _refused(self, call: UpstreamCall, answer: Connection) -> UpstreamCall | None:
        """Return the call to retry without its limit, if that was refused; `None` if a stream has begun.

        Raises:
            UpstreamError: if the call was refused for another reason.
        """
        if answer.status == 200 and answer.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return None
        body = self._without_key(await answer.read())
        if shorter := _without_limit(call, answer.status, body):
            return shorter
        refusal = refusal_of(answer.status, body, answer.headers)
        if answer.status != 200 or refusal.details:
            raise refusal
        raise UpstreamError(
            f"the upstream answered a streaming request with something else, which begins with {start_of(body)}"
        )

    async def models(self) -> list[JSONObject]:
        answer, body = await self._whole(self._connections.send("GET", "/models", self._headers), _MAX_MODELS_BYTES)
        listed = json_object(answer.status, body, answer.headers)
        check_models(listed)
        return listed.get("data") or []

    async def check(self) -> None:
        self._check_ready()
        await self.models()

    async def close(self) -> None:
        self._connections.close()

    async def _whole(self, sending: Awaitable[Connection], limit: int) -> tuple[Connection, bytes]:
        """Return the connection with the head of an answer, and the whole body without the key."""
        try:
            answer = await sending
            try:
                return answer, self._without_key(await answer.read(limit))
            finally:
                self._connections.release(answer)
        except OSError as error:
            raise self._named(error) from error

    def _without_key(self, text: bytes) -> bytes:
        for form in self._key_forms:
            text = text.replace(form, b"***")
        return text

    def _chat(self, call: UpstreamCall) -> Awaitable[Connection]:
        """Send a call, and return the connection with the head of its answer."""
        # vLLM names its own record of the call after this header, so its logs can be matched with our traces.
        headers = {**call.headers, **self._headers, "x-request-id": _ID_PREFIX.sub("", call.id)}
        path, request = "/chat/completions", call.request
        if call.prompt_ids is not None:
            path, request = "/completions", completion_request(request, call.prompt_ids)
        elif self._kind == "vllm":
            if self._tokens is not None:
                self._tokens.note_quoted(request["messages"])
            request = {**request, "messages": for_template(request["messages"])}
        return self._connections.send("POST", path, headers, orjson.dumps(request), deadline=call.route.deadline)

    def _completion_chunks(self, call: UpstreamCall) -> CompletionChunks | None:
        """Return a converter of the text completion that answers a prompt of ids; `None` for messages."""
        if call.prompt_ids is None:
            return None
        if self._tokens is None or not call.request["messages"]:  # All of the text is the answer.
            return CompletionChunks(call.prompt_ids, None)
        return self._tokens.chunks(call.request, call.prompt_ids)

    def _named(self, error: OSError) -> UpstreamError:
        """Return a failure of the connection as an error for the agent."""
        if isinstance(error, TimeoutError):
            return UpstreamError(
                f"the upstream {self.base_url} did not answer in time: see whether it is overloaded, or raise "
                "the timeouts",
                status_code=504,
            )
        if isinstance(error, TooLongError):
            return UpstreamError(f"the upstream {self.base_url} was cut short: {error}")
        remedy = "see whether the inference server is running at this address"
        if isinstance(error.__cause__, ssl.SSLError):
            remedy = (
                "if its certificate is not trusted here, name the file of its authority in SSL_CERT_FILE; if it speaks "
                "no TLS, begin the address with http://"
            )
        shown = self._without_key(str(error).encode(errors="surrogateescape")).decode(errors="surrogateescape")
        return UpstreamError(
            f"the upstream {self.base_url} broke off or cannot be reached ({shown}): {remedy}",
            fault="unreachable" if isinstance(error, UnreachableError) else "broke_off",
        )


def normalized_base_url(url: str) -> str:
    """Return the URL without a trailing slash, and with `/v1` if it had no path.

    Raises:
        ConfigError: if it is not a web address.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # A port that is not a number.
        valid = False
    if "@" in url:
        raise ConfigError(
            "upstream: the URL holds a user name or a password, which would be shown and stored with every call: "
            "give the server's key in RLLM_UPSTREAM_API_KEY, or as api_key= in Python"
        )
    if not valid or _NOT_IN_URLS.search(url) or parts.query or parts.fragment:
        raise ConfigError(
            f"upstream={url!r}: use the base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"
        )
    base_url = url.rstrip("/")
    return base_url if parts.path.strip("/") else f"{base_url}/v1"


def _read_answer(call: UpstreamCall, status: int, body: bytes, headers: Mapping[str, str]) -> JSONObject:
    """Return a whole answer, parsed and checked.

    Raises:
        UpstreamError: if it is an error, or not a completion.
    """
    may_be_plain = status == 200 and call.prompt_ids is None and not call.logprob_details
    if may_be_plain and (plain := parse_plain_answer(body)):
        return plain
    [parsed] = without_error([json_object(status, body, headers)])
    check_answer(parsed)
    return parsed


def _without_limit(call: UpstreamCall, status: int, body: bytes) -> UpstreamCall | None:
    """Return the call without its limit; `None` if its limit was not the reason for a refusal.

    Agents ask for tens of thousands of tokens without knowing the model's context, and servers refuse what does not
    fit.
    """
    limits = call.request.keys() & {"max_tokens", "max_completion_tokens"}
    if not limits or status == 200 or refusal_of(status, body, {}).details.get("code") != CONTEXT_OVERFLOW:
        return None
    return replace(call, request={name: value for name, value in call.request.items() if name not in limits})
