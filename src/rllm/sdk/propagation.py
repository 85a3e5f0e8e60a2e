"""Attribution of model calls from clients other than this package's, such as `openai.OpenAI()`.

In our process, `installed()` patches the HTTP libraries, so that a request to the active session's gateway names its
session, and `subprocess`, `multiprocessing` and `ProcessPoolExecutor`, so that programs, processes and jobs use the
session they are started in. For programs started in other ways, `environment(url)` returns the variables to set.
`hints_for` explains how each agent framework finds its model, for the error message when none of its calls arrive.

A process that is started in a session makes its calls there, and so do those that it starts in turn. Workers of pools
serve several sessions and belong to none: each job is sent together with the session that it is submitted in.
"""

from __future__ import annotations

import importlib
import inspect
import os
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rllm.capture.side_calls import OWN_KEY
from rllm.errors import ConfigError, shown
from rllm.sdk.context import Frame, Session, current_frame, in_no_session
from rllm.sdk.patching import Patch, Replacement
from rllm.sdk.recording import (
    METADATA_HEADER,
    begin,
    finish,
    is_model_call,
    metadata_stamp,
    read_stamp,
    same_origin,
    stamps,
)
from rllm.sdk.variables import beside_own_keys, gateway_variables, led_to, without_operators_keys

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import aiohttp
    from httpx import Request, Response

R = TypeVar("R")

_ENV_POSITION = 9
"""Position of `env` among the arguments of `subprocess.Popen` after the command."""


def installed() -> Patch:
    """Return a reference-counted context manager that patches the HTTP libraries; it may be entered many times."""
    return _http


def _replacements() -> Iterator[Replacement]:
    for name in ("httpx", "httpx2"):
        if library := _import(name):
            yield library.Client, "send", _sending
            yield library.AsyncClient, "send", _sending_async
            yield library.HTTPTransport, "__init__", _sharing(library)
            yield library.AsyncHTTPTransport, "__init__", _sharing(library)
    if library := _import("aiohttp"):
        yield library.ClientSession, "_request", _requesting
    yield subprocess.Popen, "__init__", _starting
    if processes := _import("concurrent.futures.process"):  # missing on systems without semaphores
        yield processes.ProcessPoolExecutor, "submit", _submitting
    if processes := _import("multiprocessing.process"):
        yield processes.BaseProcess, "start", _starting_process


_http = Patch(_replacements)


def _import(name: str) -> Any:
    """Import a library that the agent may only import in the middle of a rollout; `None` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _sending(send: Callable[..., Response]) -> Callable[..., Response]:
    def send_recorded(self: object, request: Request, **options: object) -> Response:
        with _sent(request):
            response = send(self, request, **options)
        finish(response)
        return response

    return send_recorded


def _sending_async(send: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    async def send_recorded(self: object, request: Request, **options: object) -> Response:
        with _sent(request):
            response = await send(self, request, **options)
        finish(response)
        return response

    return send_recorded


@contextmanager
def _sent(request: Request) -> Iterator[None]:
    """Stamp and register a request of httpx to the gateway, and note one that goes elsewhere."""
    frame, to_gateway = _session_of(request.method, str(request.url))
    if frame is not None and to_gateway:
        begin(request, frame, stamp=True)
    try:
        yield
    finally:
        # Checked after sending, because a client of `rllm.sdk` redirects requests to the gateway while it sends them.
        url = str(request.url)
        frame, to_gateway = _session_of(request.method, url)
        if frame is not None and not to_gateway:
            frame.note("elsewhere", url.partition("?")[0])  # without its query, which may hold keys


def _requesting(request: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
    """Wrap aiohttp's requests to add stamps only: the gateway records the calls."""

    async def request_stamped(self: aiohttp.ClientSession, method: str, url: str, **options: Any) -> R:
        full_url = str(self._build_url(url))
        frame, to_gateway = _session_of(method, full_url)
        if frame is not None and to_gateway:
            added = stamps(frame, urlsplit(full_url).path)
            headers = options.get("headers") or ()
            items = headers.items() if isinstance(headers, Mapping) else headers
            options["headers"] = [*((k, v) for k, v in items if k.lower() not in added), *added.items()]
        elif frame is not None:
            frame.note("elsewhere", full_url.partition("?")[0])
        return await request(self, method, url, **options)

    return request_stamped


def _starting(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `subprocess.Popen`, which asyncio uses too."""

    def init_with_environment(self: object, args: Any, *positional: object, **options: Any) -> None:
        frame = current_frame()
        if frame is not None and frame.base_url is not None and len(positional) <= _ENV_POSITION:
            words = args.split() if isinstance(args, str) else args
            program = os.fsdecode(words[0]) if isinstance(words, list | tuple) and words else ""
            if PurePath(program).name in PROGRAMS:
                frame.note("programs", program)
            given = options.get("env")
            inherited = without_operators_keys(os.environ if given is None else given)
            if inherited.get("OPENAI_BASE_URL") == os.environ.get("OPENAI_BASE_URL"):  # else the user chose a gateway
                inherited |= beside_own_keys(program_environment(frame), inherited)
            options["env"] = inherited
        init(self, args, *positional, **options)

    return init_with_environment


def _session_of(method: str, url: str) -> tuple[Frame | None, bool]:
    """Return the session with a gateway that a model call belongs to, and whether the call goes to that gateway."""
    frame = current_frame()
    if frame is None or frame.base_url is None or not is_model_call(method, urlsplit(url).path):
        return None, False
    return frame, same_origin(url, frame.base_url)


def environment(url: str | None = None, *, api_key: str | None = None) -> dict[str, str]:
    """Return environment variables that send a process's model clients to a gateway, and keep frameworks quiet.

        subprocess.run(command, env={**os.environ, **environment()})  # its calls belong to the current session

    Args:
        url: a gateway's or a session's URL, with or without `/v1`; by default the current session's, with a
            header that names the sessions and trajectories of this process. Clients send it if they read
            OPENAI_CUSTOM_HEADERS (openai since 2.54) or ANTHROPIC_CUSTOM_HEADERS.
        api_key: the gateway's key, if it has one.

    Raises:
        ConfigError: if no URL is given and the current session has none.
    """
    if url is None:
        frame = current_frame()
        if frame is None or frame.base_url is None:
            raise ConfigError("environment(): no session with a gateway is active here: pass the gateway's URL")
        return {**environment(frame.base_url, api_key=api_key), **_headers(metadata_stamp(frame))}
    return gateway_variables(url, api_key=api_key, inherited=os.environ)


def program_environment(frame: Frame) -> dict[str, str]:
    """Return `environment()` for a program by another author, whose calls may include some that are not of its task."""
    if frame.base_url is None:
        return {}
    return {**environment(frame.base_url), **_headers(metadata_stamp(frame, of_program=True))}


def _headers(stamp: str) -> dict[str, str]:
    """Return variables that make clients send this metadata, after headers that they send already."""
    header = f"{METADATA_HEADER}: {stamp}"
    names = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")
    return {name: "\n".join(filter(None, [os.environ.get(name), header])) for name in names}


def _sharing(library: ModuleType) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a wrapper for the `__init__` of httpx transports that shares one TLS context.

    Agents create clients in every rollout, and each would read all certificates again, for 20 ms. Clients with their
    own certificates, or with HTTP/2, which changes a context, keep contexts of their own.
    """

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def init_sharing(self: object, *arguments: object, **options: Any) -> None:
            is_plain = options.get("verify", True) is True and not options.get("cert") and not options.get("http2")
            if is_plain and not arguments:
                paths = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
                options["verify"] = _context(library, options.get("trust_env", True), paths, ssl.SSLContext)
            init(self, *arguments, **options)

        return init_sharing

    return wrap


@lru_cache(maxsize=8)
def _context(
    library: ModuleType, trust_env: bool, paths: tuple[str | None, ...], kind: type[ssl.SSLContext]
) -> ssl.SSLContext:
    """Return the library's context for these variables; `kind` is part of the key in case the class is replaced."""
    context: ssl.SSLContext = library.create_ssl_context(trust_env=trust_env)
    return context


# Other processes


_SERVE_SEVERAL = {
    "concurrent.futures.process",
    "joblib.externals.loky.process_executor",
    "loky.process_executor",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "torch.multiprocessing.pool",
}
"""Modules whose functions are run by processes that serve several sessions."""


@dataclass(frozen=True, slots=True)
class Place:
    """Reference to a session for another process."""

    name: str
    base_url: str
    stamp: str
    """Metadata and uids of the session, as in the header of a call."""

    @property
    def gateway_url(self) -> str:
        """URL of the gateway without the session, for a process that serves several."""
        return self.base_url.rpartition("/sessions/")[0] or self.base_url

    def session(self) -> Session:
        """Return a session for this process, whose calls are stored like the original session's calls."""
        metadata = read_stamp(self.stamp)
        uids = metadata.pop(OWN_KEY)
        return Session(metadata, name=self.name, base_url=self.base_url, uids_around=uids)


def _here() -> Place | None:
    frame = current_frame()
    if frame is None or frame.base_url is None:
        return None
    return Place(frame.name, frame.base_url, metadata_stamp(frame))


def bind(function: Callable[..., R]) -> Callable[..., R]:
    """Return a function that runs `function` in the current session, in whichever process or thread it is called.

    Use it for workers that outlive a rollout and receive functions, for example through a queue, and for pools of other
    libraries such as joblib. Jobs of `ProcessPoolExecutor` and `multiprocessing.Pool` are bound already. The result can
    be pickled if the function can. Outside of a session with a gateway it is the function itself.

    Raises:
        ConfigError: if the function is async.
    """
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"bind({shown(function)}): this function is async: bind one that calls asyncio.run")
    place = _here()
    return function if place is None else partial(_in_session, place, function)


def _in_session(place: Place, function: Callable[..., R], /, *args: object, **kwargs: object) -> R:
    # The gateway's URL, not the session's: a client that the worker keeps for its next job must not keep this session.
    with in_no_session(), installed(), led_to(place.gateway_url), place.session():
        return function(*args, **kwargs)


def _submitting(submit: Callable[..., Future[R]]) -> Callable[..., Future[R]]:
    """Wrap `ProcessPoolExecutor.submit` so that jobs run in the session of their caller."""

    def submit_with_session(self: object, fn: Callable[..., R], /, *args: object, **kwargs: object) -> Future[R]:
        # The process that this job may start outlives the job, so that process itself must inherit nothing.
        return Context().run(submit, self, bind(fn), *args, **kwargs)

    return submit_with_session


def _starting_process(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    """Wrap `multiprocessing.Process.start` so that the process is in the session of its starter."""

    def start_with_session(self: BaseProcess) -> None:
        frame, place = current_frame(), _here()
        if getattr(getattr(self, "_target", None), "__module__", None) in _SERVE_SEVERAL:
            # Pass the variables that lead to a gateway here, because a fork server keeps the ones it started with.
            url = os.environ.get("OPENAI_BASE_URL", "")
            names = gateway_variables(url) if url.startswith(("http://", "https://")) else {}
            arrival = _Arrival(None, {name: os.environ[name] for name in names if name in os.environ})
            _start_with(self, lambda process: Context().run(start, process), arrival)
        elif place is None or frame is None:
            start(self)
        else:
            _start_with(self, start, _Arrival(place, {}))
            frame.note("processes", self)

    return start_with_session


def _start_with(process: BaseProcess, start: Callable[[BaseProcess], None], arrival: _Arrival) -> None:
    # First, so that it is unpickled first: the module of the process's target may create a client when it is imported.
    process.__dict__ = {"_rllm_arrival": arrival, **process.__dict__}
    try:
        start(process)
    finally:
        process.__dict__.pop("_rllm_arrival", None)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Preparation of a new process, carried out there when it is unpickled; a fork needs none."""

    place: Place | None
    variables: Mapping[str, str]

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Place | None, Mapping[str, str]]]:
        return _arrive, (self.place, self.variables)


def _arrive(place: Place | None, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    if place is not None:
        _lead_to_session(place.base_url)
        installed().install()
        place.session().__enter__()


def _lead_to_session(base_url: str) -> None:
    variables = gateway_variables(base_url, inherited=os.environ)
    os.environ.update(beside_own_keys(variables, os.environ))


def _in_fork() -> None:
    """Lead the clients of a forked process to the session it was forked in, including clients that no patch reaches."""
    frame = current_frame()
    if frame is not None and frame.base_url is not None:
        _lead_to_session(frame.base_url)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


# Hints

_READS = "reads OPENAI_BASE_URL when its client is made"

MODULES = {
    "llama_index": "LlamaIndex reads OPENAI_API_BASE, and not OPENAI_BASE_URL; or OpenAILike(api_base=...)",
    "dspy": "DSPy caches answers: dspy.LM('openai/...', cache=False)",
    "crewai": "CrewAI: LLM(model='openai/...', base_url=...)",
    "google.adk": "Google ADK calls Google by default: LiteLlm(model='openai/...')",
    "claude_agent_sdk": "the Claude Agent SDK starts a program: set no ANTHROPIC_BASE_URL in "
    "ClaudeAgentOptions(env=...) or in settings.json",
    "agents.models.openai_provider": f"the OpenAI Agents SDK {_READS}; else set_default_openai_client(...)",
    "agent_framework": f"Microsoft Agent Framework {_READS}; else OpenAIChatClient(base_url=...)",
    "autogen_ext": f"AutoGen {_READS}; else OpenAIChatCompletionClient(base_url=...)",
    "smolagents": "smolagents: OpenAIModel(api_base=...), or LiteLLMModel(model_id='openai/...')",
    "strands": "Strands calls Bedrock by default: OpenAIModel(client_args={'base_url': ...})",
    "pydantic_ai": "pydantic-ai: OpenAIProvider(base_url=...), or a model named 'openai-chat:...'",
    "langchain_anthropic": "ChatAnthropic reads ANTHROPIC_BASE_URL; else ChatAnthropic(base_url=...)",
    "langchain_openai": "ChatOpenAI reads OPENAI_BASE_URL; else ChatOpenAI(base_url=...)",
    "litellm": "LiteLLM reads OPENAI_BASE_URL for openai/..., HOSTED_VLLM_API_BASE for hosted_vllm/..., "
    "ANTHROPIC_BASE_URL for anthropic/...; else api_base=...",
    "anthropic": "anthropic reads ANTHROPIC_BASE_URL (without /v1) when its client is made; else "
    "Anthropic(base_url=...)",
}
"""Hints by imported module; frameworks built on others come first."""

PROGRAMS = {
    "codex": "codex reads no variable for this: name the gateway in a [model_providers] entry of config.toml, in the "
    "folder CODEX_HOME",
    "opencode": "opencode reads OPENAI_BASE_URL for its provider openai; for others, set provider.options.baseURL in "
    "opencode.json",
    "claude": "claude reads ANTHROPIC_BASE_URL, unless its settings.json has another, or CLAUDE_CODE_USE_BEDROCK or "
    "CLAUDE_CODE_USE_VERTEX is set",
    "qwen": "qwen reads OPENAI_BASE_URL if it logs in with OPENAI_API_KEY (--auth-type openai)",
    "mini": "mini-swe-agent uses LiteLLM: name the model openai/...",
}
"""Hints by the name of a program's file."""


def hints_for(*, modules: Container[str] = sys.modules, programs: Sequence[str] = ()) -> list[str]:
    """Return how the imported frameworks and the started programs find their model.

    Args:
        modules: names of imported modules.
        programs: names or paths of programs.
    """
    started = {PurePath(program).name for program in programs}
    return [hint for name, hint in PROGRAMS.items() if name in started] + [
        hint for name, hint in MODULES.items() if name in modules
    ]
