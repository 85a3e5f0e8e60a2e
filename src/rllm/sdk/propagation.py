"""Attribution of calls of agents that do not use this package: a plain `openai.OpenAI()` or any other client.

In our process, `installed()` patches the HTTP libraries, so that a request to the active session's gateway names its
session; and `subprocess`, `multiprocessing` and `ProcessPoolExecutor`, so that programs, processes and jobs use their
session. For other ways to start one, `environment(url)` returns the variables that do so. `hints_for` explains how each
agent framework finds its model, for the error message when none of its calls arrive.
"""

from __future__ import annotations

import importlib
import os
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from rllm.errors import ConfigError
from rllm.sdk.context import Frame, current_frame
from rllm.sdk.patching import Patch, Replacement
from rllm.sdk.processes import starting, submitting
from rllm.sdk.recording import METADATA_HEADER, begin, finish, is_model_call, metadata_stamp, same_origin, stamps
from rllm.sdk.variables import beside_own_keys, gateway_variables, without_operators_keys

_ENV_POSITION = 9
"""Position of `env` among the arguments of `subprocess.Popen` after the command."""


def installed() -> Patch:
    """Return a context manager that patches the HTTP libraries; it counts, so it may be entered many times."""
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
    if processes := _import("concurrent.futures.process"):  # missing on systems without semaphores
        yield Replacement(processes.ProcessPoolExecutor, "submit", submitting)
    if processes := _import("multiprocessing.process"):
        yield Replacement(processes.BaseProcess, "start", starting)


_http = Patch(_replacements)


def _import(name: str) -> Any:
    """Return a library, even if the agent has not imported it yet: it may do so in the middle of a rollout."""
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
    """Wrap aiohttp's requests to add stamps only: the gateway records the calls."""

    async def request_stamped(self: Any, method: str, url: Any, **options: Any) -> Any:
        full_url = str(self._build_url(url))
        frame = _frame_for(method, full_url)
        if frame is not None and _goes_to_gateway(full_url, frame):
            options["headers"] = _with_stamps(options.get("headers"), stamps(frame, urlsplit(full_url).path))
        elif frame is not None:
            frame.note_elsewhere(full_url)
        return await request(self, method, url, **options)

    return request_stamped


def _starting(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `subprocess.Popen`, which asyncio uses too."""

    def init_with_environment(self: Any, args: Any, *positional: Any, **options: Any) -> None:
        frame = current_frame()
        if frame is not None and frame.base_url is not None and len(positional) <= _ENV_POSITION:
            words = args.split() if isinstance(args, str) else args
            program = os.fsdecode(words[0]) if isinstance(words, list | tuple) and words else ""
            if is_known_program(program):
                frame.note_program(program)
            options["env"] = _handed_down(options.get("env"), frame)
        init(self, args, *positional, **options)

    return init_with_environment


def _handed_down(given: Mapping[str, str] | None, frame: Frame) -> dict[str, str]:
    """Return the environment of a program; one that was prepared by the user keeps its gateway."""
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
    if frame is not None and _goes_to_gateway(url, frame):
        begin(request, frame, stamp=True)


def _note_where_it_went(request: Any) -> None:
    """Check the URL after sending, since a client of `rllm.sdk` redirects requests to the gateway only then."""
    url = str(request.url)
    frame = _frame_for(request.method, url)
    if frame is not None and not _goes_to_gateway(url, frame):
        frame.note_elsewhere(url)


def _frame_for(method: str, url: str) -> Frame | None:
    """Return the session of a request if it is a model call and the session has a gateway."""
    frame = current_frame()
    has_gateway = frame is not None and frame.base_url is not None
    return frame if has_gateway and is_model_call(method, urlsplit(url).path) else None


def _goes_to_gateway(url: str, frame: Frame) -> bool:
    return frame.base_url is not None and same_origin(url, frame.base_url)


def environment(url: str | None = None, *, api_key: str | None = None) -> dict[str, str]:
    """Return environment variables that send a process's model clients to a gateway, and keep frameworks quiet.

        subprocess.run(command, env={**os.environ, **environment()})  # its calls belong to the current session

    Args:
        url: a gateway's or a session's URL, with or without `/v1`; by default that of the current session, with a
            header that names the sessions and trajectories of this process. Clients send it if they read
            OPENAI_CUSTOM_HEADERS (openai since 2.54) or ANTHROPIC_CUSTOM_HEADERS.
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
    """Return `environment()` for a program by another author, whose calls beside its task are marked."""
    if frame.base_url is None:
        return {}
    return {**environment(frame.base_url), **_headers(metadata_stamp(frame, of_program=True))}


def _headers(stamp: str) -> dict[str, str]:
    """Return variables that make clients send this metadata, after headers that they send already."""
    header = f"{METADATA_HEADER}: {stamp}"
    names = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")
    return {name: "\n".join(filter(None, [os.environ.get(name), header])) for name in names}


_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def sharing(library: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a wrapper for the `__init__` of httpx transports that shares one TLS context.

    Agents create clients in every rollout, and each would read all certificates again, for 20 ms. Clients with their
    own certificates, or with HTTP/2, which changes a context, keep contexts of their own.
    """

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def init_sharing(self: Any, *arguments: Any, **options: Any) -> None:
            if not arguments and _is_plain(options):
                named = tuple(os.environ.get(name) for name in _VARIABLES)
                options["verify"] = _context(library, options.get("trust_env", True), named, ssl.SSLContext)
            init(self, *arguments, **options)

        return init_sharing

    return wrap


def _is_plain(options: Mapping[str, Any]) -> bool:
    return options.get("verify", True) is True and not options.get("cert") and not options.get("http2")


@lru_cache(maxsize=8)
def _context(library: Any, trust_env: bool, named: tuple[str | None, ...], kind: type[ssl.SSLContext]) -> Any:
    """Return the library's context for these variables; `kind` is part of the key in case the class is replaced."""
    return library.create_ssl_context(trust_env=trust_env)


_OPENAI = "reads OPENAI_BASE_URL when its client is made"

MODULES = {
    "llama_index": "LlamaIndex reads OPENAI_API_BASE, and not OPENAI_BASE_URL; or OpenAILike(api_base=...)",
    "dspy": "DSPy answers from its cache what was asked before: dspy.LM('openai/...', cache=False)",
    "crewai": "CrewAI: LLM(model='openai/...', base_url=...)",
    "google.adk": "Google ADK asks Google by default: LiteLlm(model='openai/...')",
    "claude_agent_sdk": "the Claude Agent SDK starts a program: no ANTHROPIC_BASE_URL in "
    "ClaudeAgentOptions(env=...) or in settings.json",
    "agents.models.openai_provider": f"the OpenAI Agents SDK {_OPENAI}; else set_default_openai_client(...)",
    "agent_framework": f"Microsoft Agent Framework {_OPENAI}; else OpenAIChatClient(base_url=...)",
    "autogen_ext": f"AutoGen {_OPENAI}; else OpenAIChatCompletionClient(base_url=...)",
    "smolagents": "smolagents: OpenAIModel(api_base=...), or LiteLLMModel(model_id='openai/...')",
    "strands": "Strands asks Bedrock by default: OpenAIModel(client_args={'base_url': ...})",
    "pydantic_ai": "pydantic-ai: OpenAIProvider(base_url=...), or a model named 'openai-chat:...'",
    "langchain_anthropic": "ChatAnthropic reads ANTHROPIC_BASE_URL; else ChatAnthropic(base_url=...)",
    "langchain_openai": "ChatOpenAI reads OPENAI_BASE_URL; else ChatOpenAI(base_url=...)",
    "litellm": "LiteLLM reads OPENAI_BASE_URL for openai/..., HOSTED_VLLM_API_BASE for "
    "hosted_vllm/..., ANTHROPIC_BASE_URL for "
    "anthropic/...; else api_base=...",
    "anthropic": "anthropic reads ANTHROPIC_BASE_URL (without /v1) when its client is made; else "
    "Anthropic(base_url=...)",
}
"""Hints by imported module; frameworks built on others come first."""

PROGRAMS = {
    "codex": "codex reads no variable for this: name the gateway in a [model_providers] entry "
    "of config.toml, in a folder that "
    "CODEX_HOME names",
    "opencode": "opencode reads OPENAI_BASE_URL for its provider openai; for others, "
    "provider.options.baseURL in opencode.json",
    "claude": "claude reads ANTHROPIC_BASE_URL, unless its settings.json has another, or CLAUDE_CODE_USE_BEDROCK or "
    "CLAUDE_CODE_USE_VERTEX is set",
    "qwen": "qwen reads OPENAI_BASE_URL where OPENAI_API_KEY is its way to log in (--auth-type openai)",
    "mini": "mini-swe-agent asks through LiteLLM: name the model openai/...",
}
"""Hints by the name of a program's file."""


def is_known_program(program: str) -> bool:
    """Return whether this is the name or path of a known agent program."""
    return PurePath(program).name in PROGRAMS


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
