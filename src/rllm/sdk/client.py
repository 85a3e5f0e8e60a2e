"""Model clients that know the session they are used in: real `openai` clients, with all their methods.

Sessions are looked up when a call is made, so one client may serve many sessions at once. Outside of any session a call
goes through untouched.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any, Self
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import openai

from rllm.capture.wire_formats import model_call_in
from rllm.errors import ConfigError, RLLMError
from rllm.sdk.context import current_frame, has_outlived_rollout
from rllm.sdk.recording import begin, finish, is_model_call

_CREDENTIALS = {"api_key", "admin_api_key", "workload_identity", "provider"}


class _Remade:
    """A client that goes to another process as the options that it was made with, and is made anew there."""

    _made_with: dict[str, Any]
    _tracker: _Tracker

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._tracker.is_ours:
            raise ConfigError(
                "this model client has an http_client of its own, which cannot be sent to another process: make the client "
                "there, inside the function that uses it"
            )
        return _make, (type(self), _without_http_client(self._made_with))


def _make(kind: type[Any], options: dict[str, Any]) -> Any:
    return kind(**options)


def _without_http_client(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "http_client"}


class ChatClient(_Remade, openai.OpenAI):
    """`openai.OpenAI` whose calls are recorded in the current session.

    It can also stand in for `client.chat.completions`, which is what LangChain's `ChatOpenAI(client=...)` expects.
    """

    def __init__(self, *, use_proxy: bool = True, **options: Any) -> None:
        self._made_with = {"use_proxy": use_proxy, **options}
        super().__init__(**_with_placeholder_key(options))
        self._use_proxy = use_proxy
        self._tracker = _Tracker(use_proxy, is_ours=options.get("http_client") is None).attach_to(self._client)

    def copy(self, **options: Any) -> ChatClient:
        """The same client with other options; it stays tracked."""
        return super().copy(**options, _extra_kwargs={"use_proxy": self._use_proxy})

    with_options = copy

    @property
    def create(self) -> Any:
        """`chat.completions.create`."""
        return self.chat.completions.create

    @property
    def with_raw_response(self) -> Any:  # not cached: what the parent caches is bare, and other threads would find it
        """As ever, and with `create` besides."""
        raw: Any = super().with_raw_response
        raw.create = raw.chat.completions.create
        return raw


class AsyncChatClient(_Remade, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` whose calls are recorded in the current session; see `ChatClient`.

    It may be used in several event loops, one after another or at once: each has connections of its own, which are closed
    with the loop.
    """

    def __init__(self, *, use_proxy: bool = True, **options: Any) -> None:
        self._made_with = {"use_proxy": use_proxy, **options}
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
        super().__init__(**_with_placeholder_key(options))
        self._use_proxy = use_proxy
        is_ours = options.get("http_client") is None
        self._tracker: _AsyncTracker = _AsyncTracker(use_proxy, is_ours=is_ours).attach_to(self._first)

    @property
    def _client(self) -> Any:
        """The HTTP client for the event loop that asks."""
        loop = asyncio._get_running_loop()
        if loop is None or not hasattr(self, "_tracker") or self._tracker.serves(loop):
            return self._first
        if loop not in self._of_loop:
            self._of_loop[loop] = type(self)(**_without_http_client(self._made_with))._client
        return self._of_loop[loop]

    @_client.setter
    def _client(self, http_client: Any) -> None:
        self._first = http_client

    def copy(self, **options: Any) -> AsyncChatClient:
        """The same client with other options; it stays tracked."""
        return super().copy(**options, _extra_kwargs={"use_proxy": self._use_proxy})

    with_options = copy

    @property
    def create(self) -> Any:
        """`chat.completions.create`."""
        return self.chat.completions.create

    @property
    def with_raw_response(self) -> Any:  # not cached: what the parent caches is bare, and other threads would find it
        """As ever, and with `create` besides."""
        raw: Any = super().with_raw_response
        raw.create = raw.chat.completions.create
        return raw


def get_chat_client(provider: str = "openai", *, use_proxy: bool = True, **options: Any) -> ChatClient:
    """An `openai.OpenAI` whose calls belong to the session they are made in.

    Args:
        provider: only "openai": any server that speaks its protocol, given by `base_url`.
        use_proxy: calls go to our gateway, and tell it their session; during training they are led to the trainer's
            gateway, whatever `base_url` says. False: to any server, unchanged, recorded in this process only.
        options: those of `openai.OpenAI`. Without a key anywhere, a placeholder is used.
    """
    _check_provider(provider)
    return ChatClient(use_proxy=use_proxy, **options)


def get_chat_client_async(provider: str = "openai", *, use_proxy: bool = True, **options: Any) -> AsyncChatClient:
    """An `openai.AsyncOpenAI` whose calls belong to the session they are made in; see `get_chat_client`."""
    _check_provider(provider)
    return AsyncChatClient(use_proxy=use_proxy, **options)


def _check_provider(provider: str) -> None:
    if provider != "openai":
        raise ConfigError(
            f"provider={provider!r}: use 'openai' and the base_url of any server that speaks its protocol"
        )


def _with_placeholder_key(options: dict[str, Any]) -> dict[str, Any]:
    if not any(options.get(name) for name in _CREDENTIALS) and not os.environ.get("OPENAI_API_KEY"):
        return {**options, "api_key": "EMPTY"}
    return options


class _Tracker:
    """The hooks of one HTTP client."""

    def __init__(self, use_proxy: bool, *, is_ours: bool) -> None:
        """`is_ours`: whether the HTTP client was made for the model client, rather than given to it."""
        self._use_proxy = use_proxy
        self.is_ours = is_ours

    def attach_to(self, http_client: Any) -> Self:
        """Add the hooks, unless this client has them: copies of a model client share their HTTP client. Returns whose hooks
        they are.

        Raises:
            ConfigError: if it has those of a client that is led elsewhere.
        """
        hooks = http_client.event_hooks
        for hook in hooks["request"]:
            if isinstance(there := getattr(hook, "__self__", None), type(self)):
                if there._use_proxy != self._use_proxy:
                    raise ConfigError(
                        f"use_proxy={self._use_proxy}: its http_client is also that of a model client with "
                        f"use_proxy={there._use_proxy}: give each an http_client of its own"
                    )
                return there
        http_client.event_hooks = {
            "request": [*hooks["request"], self.on_request],
            "response": [*hooks["response"], self.on_response],
        }
        return self

    def on_request(self, request: Any) -> Any:
        if not is_model_call(request.method, request.url.path):
            return
        if self._use_proxy and has_outlived_rollout():
            raise RLLMError(
                f"{request.method} {request.url}: the rollout that this thread or task was begun in has ended, so its model calls are "
                "no longer led to the gateway, and nobody wants them elsewhere"
            )
        frame = current_frame()
        if frame is None:
            return
        if self._use_proxy and frame.base_url is not None:
            _lead_to(frame.base_url, request)
        begin(request, frame, stamp=self._use_proxy)

    def on_response(self, response: Any) -> Any:
        finish(response)


class _AsyncTracker(_Tracker):
    """Also knows the event loop that its HTTP client belongs to: connections do not outlive theirs."""

    _lock = threading.Lock()

    def __init__(self, use_proxy: bool, *, is_ours: bool) -> None:
        super().__init__(use_proxy, is_ours=is_ours)
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._closing: AsyncIterator[None] | None = None

    def attach_to(self, http_client: Any) -> Self:
        self._http_client = weakref.ref(http_client)
        return super().attach_to(http_client)

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the HTTP client may be used in this loop, which is the first one that asks, unless it is somebody else's."""
        with self._lock:
            if self._loop is None:
                self._loop = weakref.ref(loop)
            return not self.is_ours or self._loop() is loop

    async def on_request(self, request: Any) -> None:
        if self.is_ours and self._closing is None:
            self._closing = self._closed_with_the_loop()
            await anext(self._closing)
        super().on_request(request)

    async def on_response(self, response: Any) -> None:
        super().on_response(response)

    async def _closed_with_the_loop(self) -> AsyncIterator[None]:
        """An event loop that ends finishes the asynchronous generators that were begun in it, such as this one."""
        try:
            yield
        finally:
            # It has a hold of the loop, and would keep it for as long as the model client is used.
            self._closing = None
            if (left := self._http_client()) is not None:
                await left.aclose()


def _lead_to(base_url: str, request: Any) -> None:
    """Send this call to another server: `http://here/any/prefix/v1/chat/completions` to `{base_url}/chat/completions`."""
    call = model_call_in(request.url.path)
    assert call is not None
    url = type(request.url)(base_url.rstrip("/") + call)
    request.url = url.copy_with(query=request.url.query or None)
    request.headers["host"] = urlsplit(str(url)).netloc
