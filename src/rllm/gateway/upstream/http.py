"""An OpenAI-compatible server as upstream, over HTTP."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import orjson

from rllm._runtime.untrusted import LARGE
from rllm.capture import PriorAnswer, SSEDecoder
from rllm.errors import ConfigError
from rllm.gateway.errors import CONTEXT_OVERFLOW, UpstreamError
from rllm.gateway.upstream.answers import parse_plain_answer
from rllm.gateway.upstream.base import IGNORED_HEADER, UpstreamCall
from rllm.gateway.upstream.connection import (
    MAX_ANSWER_BYTES,
    MAX_STREAM_BYTES,
    Connection,
    Exchange,
    HTTPConnections,
    TooLongError,
    UnreachableError,
)
from rllm.gateway.upstream.events import parse_events
from rllm.gateway.upstream.refusals import json_object, refusal_of, start_of, without_error
from rllm.gateway.upstream.roles import for_template
from rllm.gateway.upstream.shape import check_answer, check_models
from rllm.gateway.upstream.text_completions import TextChunks, chat_answer, completion_request
from rllm.gateway.upstream.token_prompts import TokenPrompts
from rllm.types import Message

UpstreamKind: TypeAlias = Literal["vllm", "openai"]
"""`vllm`: takes fields beyond OpenAI's, and returns token ids when asked. `openai`: rejects fields it does not know."""

_EXPLICIT: dict[UpstreamKind, dict[str, Any]] = {
    # All that a model's generation_config.json may change on the server, at the values that change nothing.
    "vllm": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "openai": {"temperature": 1.0, "top_p": 1.0},
}

_DONE = b"[DONE]"
_MAX_MODELS_BYTES = 8 * LARGE
_SECRET_FROM = 8
"""Characters that make a key more than a word such as `EMPTY`, which a server without keys is given."""
_NOT_IN_URLS = re.compile(r"[^!-~]|[\\\"<>^`{|}]")
_ID_PREFIX = re.compile(r"\A(?:chatcmpl-|cmpl-|resp_|msg_)")
"""What the dialects put before the random part of a call's id."""


class Secret:
    """The upstream's key, as text that is removed from what the upstream answers."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._forms = {self._key, self._key.replace(b"/", b"\\/")}
        # JSON may write any character by its number.
        forms = (
            rb"(?:%s|\\u00%02x%s)" % (re.escape(c), c[0], rb"|\\/" if c == b"/" else b"") for c in _characters(key)
        )
        self._escaped = re.compile(b"".join(forms), re.IGNORECASE)

    def hidden(self, text: bytes) -> bytes:
        """Return bytes without the key."""
        for form in self._forms:
            text = text.replace(form, b"***")
        return self._escaped.sub(b"***", text) if b"\\u00" in text else text

    def hidden_in_stream(self) -> Callable[[bytes], bytes]:
        """Return what removes the key from pieces of a stream of events, which it passes on line by line."""
        rest = b""

        def hide(received: bytes) -> bytes:
            nonlocal rest
            text = rest + received
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            rest = text[end:]
            return self.hidden(text[:end])

        return hide


def _characters(key: str) -> list[bytes]:
    return [bytes([code]) for code in key.encode()]


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
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 600.0,
        total_timeout_s: float = 3600.0,
    ) -> None:
        """Nothing is sent before the first call.

        Args:
            base_url: up to and including `/v1`, which is added to a URL without a path.
            model: replaces the model that agents ask for; `None` passes theirs on.
            tokens: the served model's tokenizer, with which later turns go on from the very tokens that were sampled; `None`
                leaves it to the server to render them anew.
            read_timeout_s: the longest silence of the server, the time until its first byte included.

        Raises:
            ConfigError: if the URL is not a web address.
        """
        self.base_url = normalized_base_url(base_url)
        self._model = model
        self._kind: UpstreamKind = kind
        self._tokens = tokens
        self._headers = {"content-type": "application/json"}
        self._key = api_key if api_key and len(api_key) >= _SECRET_FROM else ""
        self._secret = Secret(self._key) if self._key else None
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._connections = HTTPConnections(
            self.base_url,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            total_timeout_s=total_timeout_s,
        )

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
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

    def ignored(self, request: Mapping[str, Any]) -> Sequence[str]:
        return ()

    def continued_prompt(self, request: Mapping[str, Any], prior: PriorAnswer) -> list[int] | None:
        return None if self._tokens is None else self._tokens.continued(request, prior)

    def lost(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[str, ...]:
        """See `ChatTemplate.lost`."""
        return () if self._tokens is None else self._tokens.lost(messages, tools)

    async def complete(self, call: UpstreamCall) -> dict[str, Any]:
        with self._told():
            return await self._complete(call)

    async def _complete(self, call: UpstreamCall) -> dict[str, Any]:
        async with self._chat(call) as answer:
            body = await self._body_of(answer)
            call.route.ignored = answer.headers.get(IGNORED_HEADER, "")
        if answer.status != 200 and (shorter := _without_limit(call, answer.status, body)):
            return await self._complete(shorter)
        read = partial(_read_answer, call, answer.status, body, answer.headers)
        # All other calls would wait meanwhile.
        parsed = read() if len(body) < LARGE else await asyncio.to_thread(read)
        if call.prompt_ids is None:
            return parsed
        if (tokens := self._reader_of(call)) is None:
            return chat_answer(parsed, call.prompt_ids)
        return tokens.chat_answer(parsed, call.request, call.prompt_ids)

    async def stream(self, call: UpstreamCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        decoder = SSEDecoder()
        num_read = num_unread = 0
        is_done = False
        without_key = self._secret.hidden_in_stream() if self._secret else bytes
        as_chat = self._chunk_reader(call)
        with self._told():
            async with self._chat(call) as answer:
                shorter = await self._refused(call, answer)
                call.route.ignored = answer.headers.get(IGNORED_HEADER, "")
                while not is_done and (received := await answer.read_some()):
                    events = decoder.feed(without_key(received))
                    if is_done := _DONE in events:
                        del events[events.index(_DONE) :]  # proxies say more, and clients read no further either
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
                        yield as_chat(without_error(chunks))
                if is_done:
                    await answer.pass_over_rest()
        if shorter is not None:
            async with aclosing(self.stream(shorter)) as batches:
                async for batch in batches:
                    yield batch

    async def _refused(self, call: UpstreamCall, answer: Connection) -> UpstreamCall | None:
        """The call as it is to be made again, where no stream has begun for its limit; `None` where one has.

        Raises:
            UpstreamError: if none has for another reason.
        """
        if answer.status == 200 and answer.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return None
        body = await self._body_of(answer)
        if shorter := _without_limit(call, answer.status, body):
            return shorter
        raise _not_a_stream(answer.status, body, answer.headers)

    async def models(self) -> list[dict[str, Any]]:
        with self._told():
            async with self._connections.exchange("GET", "/models", self._headers) as answer:
                body = await self._body_of(answer, _MAX_MODELS_BYTES)
                listed = json_object(answer.status, body, answer.headers)
            check_models(listed)
        return listed.get("data") or []

    async def check(self) -> None:
        await self.models()

    async def close(self) -> None:
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that carry no call; the others close when theirs is answered."""
        self._connections.close()

    def _chat(self, call: UpstreamCall) -> Exchange:
        # vLLM names its own record of the call after this header, so its logs can be matched with our traces.
        headers = {**call.headers, **self._headers, "x-request-id": _ID_PREFIX.sub("", call.id)}
        path, request = "/chat/completions", call.request
        if call.prompt_ids is not None:
            path, request = "/completions", completion_request(request, call.prompt_ids)
        elif self._kind == "vllm":
            if self._tokens is not None:
                self._tokens.note_quoted(request["messages"])
            request = {**request, "messages": for_template(request["messages"])}
        return self._connections.exchange("POST", path, headers, orjson.dumps(request), deadline=call.route.deadline)

    def _reader_of(self, call: UpstreamCall) -> TokenPrompts | None:
        """What finds reasoning and tool calls in a text completion; `None` where all of its text is the answer."""
        return self._tokens if call.request["messages"] else None

    def _chunk_reader(self, call: UpstreamCall) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        """What makes chat chunks of the chunks of an answer."""
        if call.prompt_ids is None:
            return lambda chunks: chunks
        tokens = self._reader_of(call)
        reader = TextChunks(call.prompt_ids) if tokens is None else tokens.chat_chunks(call.request, call.prompt_ids)
        return lambda chunks: [reader.feed(chunk) for chunk in chunks]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever fails here is told as what it means to an agent, and without the key, which some servers repeat: it is shown and
        stored."""
        try:
            yield
        except UpstreamError as error:
            if self._key:
                error.hide(self._key)
            raise
        except OSError as error:
            raise self._named(error) from error

    async def _body_of(self, answer: Connection, *limit: int) -> bytes:
        """Return the whole body without the key, which some servers repeat: it is shown and stored."""
        body = await answer.read(*limit)
        return self._secret.hidden(body) if self._secret else body

    def _named(self, error: OSError) -> UpstreamError:
        """A failure of the connection as what it means to an agent."""
        if isinstance(error, TimeoutError):
            return UpstreamError(
                f"the upstream {self.base_url} did not answer in time: see whether it is overloaded, or raise the timeouts",
                status_code=504,
            )
        if isinstance(error, TooLongError):
            return UpstreamError(f"the upstream {self.base_url} was cut short: {error}")
        return UpstreamError(
            f"the upstream {self.base_url} broke off or cannot be reached ({error}): {_remedy(error)}",
            fault="unreachable" if isinstance(error, UnreachableError) else "broke_off",
        )


def _remedy(error: OSError) -> str:
    """What helps against a connection that failed."""
    match error.__cause__:
        case ssl.SSLCertVerificationError():
            return "its certificate is not trusted here: name the file of its authority in SSL_CERT_FILE"
        case ssl.SSLError():
            return "it does not seem to speak TLS there: see whether the address should begin with http://"
        case _:
            return "see whether the inference server is running at this address"


def normalized_base_url(url: str) -> str:
    """The URL without a trailing slash, and with `/v1` if it had no path.

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
            "give the server's key as --upstream-api-key (RLLM_UPSTREAM_API_KEY)"
        )
    if not valid or _NOT_IN_URLS.search(url) or parts.query or parts.fragment:
        raise ConfigError(
            f"{url!r} is no address of a server: use the base URL of an OpenAI-compatible server, as in http://127.0.0.1:8000/v1"
        )
    base_url = url.rstrip("/")
    return base_url if parts.path.strip("/") else f"{base_url}/v1"


def _read_answer(call: UpstreamCall, status: int, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return what a whole answer says.

    Raises:
        UpstreamError: if it is an error, or nothing that was asked for.
    """
    may_be_plain = status == 200 and call.prompt_ids is None and not call.logprob_details
    if may_be_plain and (plain := parse_plain_answer(body)):
        return plain
    [parsed] = without_error([json_object(status, body, headers)])
    check_answer(parsed)
    return parsed


def _without_limit(call: UpstreamCall, status: int, body: bytes) -> UpstreamCall | None:
    """The call again, for as long an answer as there is room for; `None` if its limit was not what was refused.

    Agents ask for tens of thousands of tokens without knowing the model's context, and servers refuse what does not fit.
    """
    limits = call.request.keys() & {"max_tokens", "max_completion_tokens"}
    if not limits or status == 200 or refusal_of(status, body, {}).details.get("code") != CONTEXT_OVERFLOW:
        return None
    return replace(call, request={name: value for name, value in call.request.items() if name not in limits})


def _not_a_stream(status: int, body: bytes, headers: Mapping[str, str]) -> UpstreamError:
    refusal = refusal_of(status, body, headers)
    if status != 200 or refusal.details:
        return refusal
    return UpstreamError(
        f"the upstream answered a streaming request with something else, which begins with {start_of(body)}"
    )
