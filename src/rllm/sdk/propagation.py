"""Attribute the calls of agents that know nothing of us: they use a plain `openai.OpenAI()` or any other client.

In our process, `installed()` patches the HTTP libraries, so that a request that goes to the active session's gateway says
which session it belongs to; and `subprocess`, `multiprocessing` and `ProcessPoolExecutor`, so that programs, processes
and jobs are led to their session. For other ways to start one, `environment(url)` gives the variables that do so.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rllm.errors import ConfigError
from rllm.sdk.certificates import sharing
from rllm.sdk.context import Frame, current_frame
from rllm.sdk.frameworks import is_known_program
from rllm.sdk.patching import Patch, Replacement
from rllm.sdk.processes import starting, submitting
from rllm.sdk.recording import METADATA_HEADER, begin, finish, is_model_call, metadata_stamp, same_origin, stamps
from rllm.sdk.variables import beside_own_keys, gateway_variables, without_operators_keys

_ENV_POSITION = 9
"""Which of the arguments of `subprocess.Popen` is `env`, behind the command; hardly anybody gives it by position."""


def installed() -> Patch:
    """A context manager that keeps the HTTP libraries patched; it counts, so it may be entered many times at once."""
    return _http


def _replacements() -> Iterator[Replacement]:
    for name in ("httpx", "httpx2"):
        if library := _import(name):
            yield Replacement(library.Client, "send", _sending)
            yield Replacement(library.AsyncClient, "send", _sending_async)
            yield Replacement(library.HTTPTransport, "__init__", sharing(library))
            yield Replacement(library.AsyncHTTPTransport, "__init__", sharing(library))
    if aiohttp := _import("aiohttp"):
        yield Replacement(aiohttp.ClientSession, "_request", _requesting)
    yield Replacement(subprocess.Popen, "__init__", _starting)
    if processes := _import("concurrent.futures.process"):  # not where semaphores are missing
        yield Replacement(processes.ProcessPoolExecutor, "submit", submitting)
    if processes := _import("multiprocessing.process"):
        yield Replacement(processes.BaseProcess, "start", starting)


_http = Patch(_replacements)


def _import(name: str) -> Any:
    """The library, whether or not the agent has imported it yet: it may do so in the middle of a rollout."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _sending(send: Callable[..., Any]) -> Callable[..., Any]:
    def send_recorded(self: Any, request: Any, **options: Any) -> Any:
        _begin(request)
        try:
            response = send(self, request, **options)
        finally:
            _note_where_it_went(request)
        finish(response)
        return response

    return send_recorded


def _sending_async(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def send_recorded(self: Any, request: Any, **options: Any) -> Any:
        _begin(request)
        try:
            response = await send(self, request, **options)
        finally:
            _note_where_it_went(request)
        finish(response)
        return response

    return send_recorded


def _requesting(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """aiohttp's calls are stamped only: the gateway records them, and the stamp tells which session they were made in."""

    async def request_stamped(self: Any, method: str, url: Any, **options: Any) -> Any:
        full_url = str(self._build_url(url))
        frame = _frame_for(method, full_url)
        if frame is not None and _goes_home(full_url, frame):
            options["headers"] = _with_stamps(options.get("headers"), stamps(frame, urlsplit(full_url).path))
        elif frame is not None:
            frame.note_elsewhere(full_url)
        return await request(self, method, url, **options)

    return request_stamped


def _starting(init: Callable[..., None]) -> Callable[..., None]:
    """asyncio starts its subprocesses so, too."""

    def init_led_home(self: Any, args: Any, *positional: Any, **options: Any) -> None:
        frame = current_frame()
        if frame is not None and frame.base_url is not None and len(positional) <= _ENV_POSITION:
            words = args.split() if isinstance(args, str) else args
            program = os.fsdecode(words[0]) if isinstance(words, list | tuple) and words else ""
            if is_known_program(program):
                frame.note_program(program)
            options["env"] = _handed_down(options.get("env"), frame)
        init(self, args, *positional, **options)

    return init_led_home


def _handed_down(given: Mapping[str, str] | None, frame: Frame) -> dict[str, str]:
    """What a program gets that is started with this environment; one that was made for it is not led elsewhere."""
    inherited = without_operators_keys(os.environ if given is None else given)
    if inherited.get("OPENAI_BASE_URL") != os.environ.get("OPENAI_BASE_URL"):
        return inherited
    return {**inherited, **beside_own_keys(program_environment(frame), inherited)}


def _with_stamps(headers: Any, added: Mapping[str, str]) -> list[tuple[str, str]]:
    items = headers.items() if isinstance(headers, Mapping) else headers or ()
    return [*((name, value) for name, value in items if name.lower() not in added), *added.items()]


def _begin(request: Any) -> None:
    url = str(request.url)
    frame = _frame_for(request.method, url)
    if frame is not None and _goes_home(url, frame):
        begin(request, frame, stamp=True)


def _note_where_it_went(request: Any) -> None:
    """Asked after sending, because a client of `rllm.sdk` leads its requests to the gateway only then."""
    url = str(request.url)
    frame = _frame_for(request.method, url)
    if frame is not None and not _goes_home(url, frame):
        frame.note_elsewhere(url)


def _frame_for(method: str, url: str) -> Frame | None:
    """The session that this request belongs to, if it is a model call and the session has a gateway."""
    frame = current_frame()
    has_gateway = frame is not None and frame.base_url is not None
    return frame if has_gateway and is_model_call(method, urlsplit(url).path) else None


def _goes_home(url: str, frame: Frame) -> bool:
    return frame.base_url is not None and same_origin(url, frame.base_url)


def environment(url: str | None = None, *, api_key: str | None = None) -> dict[str, str]:
    """The environment variables that lead the model clients of another process to a gateway, and keep frameworks quiet.

        subprocess.run(command, env={**os.environ, **environment()})  # its calls belong to the current session

    Args:
        url: a gateway's or a session's URL, with or without `/v1`; by default that of the current session, and then
            with a header that tells in which sessions and trajectories of this process the calls are made. Clients
            send that header if they read OPENAI_CUSTOM_HEADERS (openai since 2.54) or ANTHROPIC_CUSTOM_HEADERS.
        api_key: the gateway's key, if it has one.

    Raises:
        ConfigError: if no URL is given and the current session has none.
    """
    if url is None:
        frame = current_frame()
        if frame is None or frame.base_url is None:
            raise ConfigError("environment(): there is no session with a gateway here: pass the gateway's URL")
        return {**environment(frame.base_url, api_key=api_key), **_headers(metadata_stamp(frame))}
    return gateway_variables(url, api_key=api_key, inherited=os.environ)


def program_environment(frame: Frame) -> dict[str, str]:
    """As `environment()`, for a program that need not be the author's own: what it calls beside its task is told apart."""
    if frame.base_url is None:
        return {}
    return {**environment(frame.base_url), **_headers(metadata_stamp(frame, of_program=True))}


def _headers(stamp: str) -> dict[str, str]:
    """The variables that make clients send this metadata, behind the headers that they send already."""
    header = f"{METADATA_HEADER}: {stamp}"
    names = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")
    return {name: "\n".join(filter(None, [os.environ.get(name), header])) for name in names}
