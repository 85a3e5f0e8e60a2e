"""Model clients that know the session they are used in: real `openai` clients with all their methods.

The session is looked up when a call is made, so one client may serve many sessions at once. Outside of any session a
call is passed through unchanged.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import openai

from rllm.capture.wire_formats import model_call_in
from rllm.errors import ConfigError, RLLMError
from rllm.sdk.context import current_frame, has_outlived_rollout
from rllm.sdk.recording import begin, finish, is_model_call
from rllm.types import JSONObject

if TYPE_CHECKING:
    from httpx import Request, Response

_CREDENTIALS = {"api_key", "admin_api_key", "workload_identity", "provider"}


class _TrackedClient:
    """Additions to `openai.OpenAI` and `openai.AsyncOpenAI`. A client is pickled as its options."""

    _made_with: JSONObject
    _use_proxy: bool
    _tracker: _Tracker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if not self._tracker.owns_client:
            raise ConfigError(
                "this model client was made with http_client=..., which cannot be sent to another process: make "
                "the client inside the function that uses it"
            )
        return partial(type(self), **_without_http_client(self._made_with)), ()

    def copy(self, **options: Any) -> Self:
        """Return the same client with other options; it stays tracked."""
        parent: Any = super()
        copied: Self = parent.copy(**options, _extra_kwargs={"use_proxy": self._use_proxy})
        return copied

    with_options = copy

    @property
    def create(self) -> Any:
        """`chat.completions.create`."""
        client: Any = self
        return client.chat.completions.create

    @property
    def with_raw_response(self) -> Any:  # not cached, unlike in the parent: other threads would see it without `create`
        """The parent's property, with `create` added."""
        parent: Any = super()
        raw = parent.with_raw_response
        raw.create = raw.chat.completions.create
        return raw


def _without_http_client(options: JSONObject) -> JSONObject:
    return {name: value for name, value in options.items() if name != "http_client"}


class ChatClient(_TrackedClient, openai.OpenAI):
    """`openai.OpenAI` whose calls are recorded in the current session.

    It can also replace `client.chat.completions`, which LangChain's `ChatOpenAI(client=...)` expects.
    """

    def __init__(self, *, use_proxy: bool = True, **options: Any) -> None:
        self._made_with = {"use_proxy": use_proxy, **options}
        super().__init__(**_with_placeholder_key(options))
        self._use_proxy = use_proxy
        self._tracker = _Tracker(use_proxy, owns_client=options.get("http_client") is None).attach_to(self._client)


class AsyncChatClient(_TrackedClient, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` whose calls are recorded in the current session; see `ChatClient`.

    It may be used in several event loops, one after another or at once: each has its own connections, closed with the
    loop.
    """

    _tracker: _AsyncTracker

    def __init__(self, *, use_proxy: bool = True, **options: Any) -> None:
        self._made_with = {"use_proxy": use_proxy, **options}
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
        super().__init__(**_with_placeholder_key(options))
        self._use_proxy = use_proxy
        owns_client = options.get("http_client") is None
        self._tracker = _AsyncTracker(use_proxy, owns_client=owns_client).attach_to(self._first)

    @property
    def _client(self) -> Any:
        """HTTP client for the running event loop."""
        loop = asyncio._get_running_loop()
        if loop is None or not hasattr(self, "_tracker") or self._tracker.serves(loop):
            return self._first
        if loop not in self._of_loop:
            self._of_loop[loop] = type(self)(**_without_http_client(self._made_with))._client
        return self._of_loop[loop]

    @_client.setter
    def _client(self, http_client: Any) -> None:
        self._first = http_client


def get_chat_client(provider: str = "openai", *, use_proxy: bool = True, **options: Any) -> ChatClient:
    """Return an `openai.OpenAI` whose calls belong to the session they are made in.

    Args:
        provider: only "openai": any server that speaks its protocol, given by `base_url`.
        use_proxy: send calls to our gateway with their session; during training to the trainer's gateway, regardless of
            `base_url`. False: send them to any server, unchanged, and record them in this process only.
        options: options of `openai.OpenAI`. Without an API key, a placeholder is used.
    """
    _check_provider(provider)
    return ChatClient(use_proxy=use_proxy, **options)


def get_chat_client_async(provider: str = "openai", *, use_proxy: bool = True, **options: Any) -> AsyncChatClient:
    """Return an `openai.AsyncOpenAI` whose calls belong to the session they are made in; see `get_chat_client`."""
    _check_provider(provider)
    return AsyncChatClient(use_proxy=use_proxy, **options)


def _check_provider(provider: str) -> None:
    if provider != "openai":
        raise ConfigError(
            f"provider={provider!r}: use 'openai', with the base_url of any server that speaks its protocol"
        )


def _with_placeholder_key(options: JSONObject) -> JSONObject:
    if not any(options.get(name) for name in _CREDENTIALS) and not os.environ.get("OPENAI_API_KEY"):
        return {**options, "api_key": "EMPTY"}
    return options


class _Tracker:
    """Hooks of one HTTP client."""

    def __init__(self, use_proxy: bool, *, owns_client: bool) -> None:
        """Set `owns_client` if the HTTP client was created for the model client rather than passed to it."""
        self._use_proxy = use_proxy
        self.owns_client = owns_client

    def attach_to(self, http_client: Any) -> Self:
        """Add the hooks, and return their tracker. Copies of a model client share an HTTP client, with its hooks."""
        hooks = http_client.event_hooks
        for hook in hooks["request"]:
            if isinstance(tracker := getattr(hook, "__self__", None), type(self)):
                return tracker
        http_client.event_hooks = {
            "request": [*hooks["request"], self.on_request],
            "response": [*hooks["response"], self.on_response],
        }
        return self

    def on_request(self, request: Request) -> Awaitable[None] | None:
        if not is_model_call(request.method, request.url.path):
            return None
        if self._use_proxy and has_outlived_rollout():
            raise RLLMError(
                f"{request.method} {request.url}: the rollout of this thread or task has ended, so its model calls "
                "can no longer be recorded; end threads and tasks with their rollout"
            )
        if (frame := current_frame()) is not None:
            if self._use_proxy and frame.base_url is not None:
                call = model_call_in(request.url.path)
                assert call is not None
                url = type(request.url)(frame.base_url.rstrip("/") + call)
                request.url = url.copy_with(query=request.url.query or None)
                request.headers["host"] = urlsplit(str(url)).netloc
            begin(request, frame, stamp=self._use_proxy)
        return None

    def on_response(self, response: Response) -> Awaitable[None] | None:
        finish(response)
        return None


class _AsyncTracker(_Tracker):
    """Tracker that also knows the event loop of its HTTP client, whose connections end with the loop."""

    _lock = threading.Lock()

    def __init__(self, use_proxy: bool, *, owns_client: bool) -> None:
        super().__init__(use_proxy, owns_client=owns_client)
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._closing: AsyncIterator[None] | None = None

    def attach_to(self, http_client: Any) -> Self:
        self._http_client = weakref.ref(http_client)
        return super().attach_to(http_client)

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the HTTP client may be used in this loop.

        A client of our own belongs to the first loop that uses it; one that was passed in serves any loop.
        """
        with self._lock:
            if self._loop is None:
                self._loop = weakref.ref(loop)
            return not self.owns_client or self._loop() is loop

    async def on_request(self, request: Request) -> None:
        if self.owns_client and self._closing is None:
            self._closing = self._closed_with_the_loop()
            await anext(self._closing)
        super().on_request(request)

    async def on_response(self, response: Response) -> None:
        super().on_response(response)

    async def _closed_with_the_loop(self) -> AsyncIterator[None]:
        """Close the HTTP client when the loop ends, which then finishes the asynchronous generators started in it."""
        try:
            yield
        finally:
            # The generator references the loop, and would keep it alive as long as the model client.
            self._closing = None
            if (client := self._http_client()) is not None:
                await client.aclose()
