"""Servers of a gateway: in a thread alongside a trainer, or in the foreground for the command line."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp

from rllm._runtime.process import on_ctrl_c
from rllm.errors import ConfigError, RLLMError, counted
from rllm.gateway.app import create_app
from rllm.gateway.config import GatewayConfig
from rllm.gateway.errors import STOPPED
from rllm.gateway.http_limits import BoundedHTTP
from rllm.gateway.identity import session_key, unnamed_key
from rllm.gateway.sessions import Sessions
from rllm.gateway.upstream.base import Upstream
from rllm.store.base import TraceStore
from rllm.types import JSONMapping

__all__ = ["GatewayServer"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_CANCEL_S = 0.1
"""Seconds for the clients of calls that are cut off to get an error."""
_CLOSING_TICK_S = 0.005


class ServerThread:
    """Uvicorn server of an ASGI application, with an event loop in a thread of its own."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        shutdown_timeout_s: float = 10.0,
        limits: GatewayConfig | None = None,
    ) -> None:
        """Prepare a server; `limits` bounds the sizes of headers, and the time that requests take to arrive."""
        self._app = app
        self._host, self._port = host, port
        self._shutdown_timeout_s = shutdown_timeout_s
        self._limits = limits or GatewayConfig()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Address of the server: `http://host:port`, without a path."""
        if not self._url:
            raise RLLMError("the server has no address before it is started: call start() first")
        return self._url

    def start(self) -> Self:
        """Listen, and return once requests are answered.

        Raises:
            ConfigError: if the address is not available; no thread is left then.
            RLLMError: if it does not start for another reason.
        """
        listener = bind(self._host, self._port)
        self._url = url_of(listener, self._host)
        server = _Server(uvicorn_config(self._app, self._shutdown_timeout_s, self._limits))
        self._thread = threading.Thread(
            target=_run_or_fail, args=(server, listener), name=f"serving {self._url}", daemon=True
        )
        self._thread.start()
        if not server.ready.wait(_START_TIMEOUT_S):
            raise RLLMError(f"the server at {self._url} did not start within {_START_TIMEOUT_S:g} s")
        if not server.started:
            self._thread.join(_START_TIMEOUT_S)
            raise RLLMError(f"the server at {self._url} did not start: {server.failure!r}") from server.failure
        self._server = server
        return self

    def stop(self) -> None:
        """Stop listening, let calls in progress end within the shutdown time, and join the thread. Repeatable."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(self._shutdown_timeout_s + _START_TIMEOUT_S)
        self._server = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class GatewayServer(ServerThread):
    """Gateway in a thread. The caller closes the store.

    with GatewayServer(store, EngineUpstream(engine, "policy")) as gateway:
        client = OpenAI(base_url=gateway.open_session("rollout-1"), api_key="unused")
    """

    def __init__(self, store: TraceStore, upstream: Upstream, config: GatewayConfig | None = None) -> None:
        config = config or GatewayConfig()
        self.store = store
        self.config = config
        self._sessions = Sessions(store, memory_gb=config.session_memory_gb)
        app = create_app(store, upstream, config, sessions=self._sessions)
        super().__init__(
            app, host=config.host, port=config.port, shutdown_timeout_s=config.shutdown_timeout_s, limits=config
        )

    @property
    def process_key(self) -> str | None:
        """Key for calls of this process that belong to no session, if the gateway needs one."""
        return None if self.config.api_key is None else unnamed_key(self.config.api_key)

    @property
    def num_unattributed_calls(self) -> int:
        """Calls so far that named no session while rollouts were under way."""
        return self._sessions.unattributed.num_calls

    def session_url(self, session_id: str) -> str:
        """Return the base URL for an agent of this session, up to and including `/v1`."""
        return f"{self.url}/sessions/{quote(session_id, safe='')}/v1"

    def open_session(
        self,
        session_id: str,
        *,
        metadata: JSONMapping | None = None,
        sampling: JSONMapping | None = None,
    ) -> str:
        """Begin a session, or add to one; `sampling` is imposed on its calls, whatever the agent requests.

        Returns at once with the base URL for the agent; the session is durable before its first trace. Thread-safe.

        Raises:
            ConfigError: if the id cannot stand in a URL path, or a sampling parameter is unknown or out of range.
        """
        self._sessions.open(session_id, metadata=metadata, sampling=sampling)
        return self.session_url(session_id)

    def open_session_with_key(
        self, session_id: str, *, metadata: JSONMapping | None = None, sampling: JSONMapping | None = None
    ) -> tuple[str, str | None]:
        """Begin a session as `open_session` does, and return its key as well, if the gateway needs one.

        Returns once the session is durable.
        """
        self._sessions.open(session_id, metadata=metadata, sampling=sampling).result()
        found = self.store.session(session_id)
        if self.config.api_key is None or found is None or found.number is None:
            return self.session_url(session_id), None
        return self.session_url(session_id), session_key(self.config.api_key, session_id, found.number)


def serve(app: ASGIApp, listener: socket.socket, config: GatewayConfig) -> None:
    """Serve in the foreground until SIGINT or SIGTERM; calls in flight may end within the shutdown time.

    For a process that does nothing else: it also makes garbage collection rarer, because parsing a streamed answer
    makes thousands of short-lived objects, and searching them for cycles doubles its cost.
    """
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    _run(_Server(uvicorn_config(app, config.shutdown_timeout_s, config)), listener)


_reserved: dict[tuple[str, int], socket.socket] = {}
"""The socket of `reserve`, by host and port."""


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that reserves its port for the next `bind` to it in this process; until then nothing listens.

    Raises:
        ConfigError: see `bind`.
    """
    listener = bind(host, port, listens=False)
    for earlier in _reserved.values():
        earlier.close()
    _reserved.clear()
    _reserved[host, listener.getsockname()[1]] = listener
    return listener


def bind(host: str, port: int, *, prefix: str = "gateway.", listens: bool = True) -> socket.socket:
    """Return a listening socket; `prefix` precedes `host` and `port` in errors.

    Raises:
        ConfigError: if the port is in use or privileged, or the host is not an address of this machine.
    """
    reserved = _reserved.pop((host, port), None)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = reserved or socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{prefix}host={host!r}: {error}: use an address of this machine, such as 127.0.0.1"
        ) from error
    try:
        if reserved is None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        if listens:
            listener.listen(2048)
    except OSError as error:
        listener.close()
        remedy = (
            "another program listens there: stop it, or choose another port (0 takes any free one)"
            if error.errno == errno.EADDRINUSE
            else f"{error.strerror}: use an address of this machine and a port above 1023"
        )
        raise ConfigError(f"{prefix}port={port} on host {host!r}: {remedy}") from error
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """Return the address at which a client on this machine reaches the listener."""
    shown = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{listener.getsockname()[1]}"


def uvicorn_config(app: ASGIApp, shutdown_timeout_s: float, limits: GatewayConfig) -> uvicorn.Config:
    """Return settings that log little, use the fast parser, and keep connections for longer than clients pause."""
    return uvicorn.Config(
        app,
        http=partial(BoundedHTTP, limits=limits),  # type: ignore[arg-type]  # Called like the class that it makes.
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=300,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout_s)),
    )


class _Server(uvicorn.Server):
    """Uvicorn's server, which reports its start, ends as soon as no call is in progress, and re-raises no signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        """Error that kept it from starting, if it runs in a thread."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError:
            await self.lifespan.shutdown()
            raise
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110 - sets lack events
                    await asyncio.sleep(_CLOSING_TICK_S)
        if state.tasks:
            logger.error("%s cut off at the end of the shutdown time", counted(len(state.tasks), "call"))
            for task in state.tasks:
                task.cancel(STOPPED)
            await asyncio.wait(state.tasks, timeout=_CANCEL_S)
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again afterwards, as uvicorn does: the store has yet to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self.handle_exit)
        try:
            with on_ctrl_c(self.handle_exit):
                yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _run(server: _Server, listener: socket.socket) -> None:
    """Serve in a new event loop until the server exits; uvloop's if it is installed (not on Windows)."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ModuleNotFoundError):
        from uvloop import new_event_loop as loop_factory
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(server.serve(sockets=[listener]))
    finally:
        server.ready.set()  # Threads that wait for a failed start must not wait forever.
        listener.close()


def _run_or_fail(server: _Server, listener: socket.socket) -> None:
    """Run the server; if it does not start, keep the error for `start` to raise."""
    try:
        _run(server, listener)
    except BaseException as error:
        if server.started:
            raise
        server.failure = error
