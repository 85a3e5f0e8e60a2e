"""`rllm run`: start any program as an agent, and take back what it did."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from rllm._runtime.untrusted import shown
from rllm.cli.options import (
    DEFAULT_STORE,
    ChatTemplateFile,
    GatewayKey,
    ModelOrName,
    Server,
    ServerKind,
    Store,
    Tokenizer,
    above_zero,
)

if TYPE_CHECKING:
    from rllm.cli.model_source import ModelSource
    from rllm.engine.capture import SessionTraces
    from rllm.gateway.upstream import UpstreamKind
    from rllm.sdk.supervised import Limits, ProgramResult, Stream
    from rllm.types import Trace

TIMED_OUT = 124
"""The exit code where the time was up, as of timeout(1)."""
LAST_CALLS_S = 2.0
"""How long calls that a program has left behind may take to end, and be stored."""


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    """A session of a gateway that is there."""

    name: str
    base_url: str
    key: str | None
    store: SessionTraces
    settle: Callable[[ProgramResult], None]
    """Waits, not for long, for what is still to be stored of a program that has ended."""


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="-- COMMAND")],
    session: Annotated[
        str | None, typer.Option(help="Session that its calls are filed under; else a new one.", show_default=False)
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(help="Gateway that is running already.", metavar="URL", show_default=False)
    ] = None,
    api_key: GatewayKey = None,
    upstream: Server = None,
    model: ModelOrName = None,
    upstream_kind: ServerKind = "vllm",
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplateFile = None,
    store: Store = DEFAULT_STORE,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which it is ended, with exit code 124.", show_default=False, callback=above_zero
        ),
    ] = None,
    max_output: Annotated[
        int, typer.Option(help="Bytes of its stdout, and of its stderr, that are passed on.", min=0)
    ] = 1_000_000,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Said of the session; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    allow_no_calls: Annotated[
        bool, typer.Option("--allow-no-calls", help="A program that calls no model is no failure.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File for its episode, as JSON.", show_default=False)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Its episode on stdout, as one line of JSON; what it prints goes to stderr.")
    ] = False,
) -> None:
    """Start any program with its model clients led to a gateway, and take back what it did, token by token.

    The model is that of --gateway, of --base-url or of --model. A gateway that runs already keeps the traces; else they are in
    --store. Exit code: the program's own; 124 if its time was up; 1 if it ended well and no call of it arrived. All processes
    that it has started end with it.
    """
    from rllm.cli.model_source import refuse_options_of_server
    from rllm.cli.run_report import episode_of, interrupted, summary
    from rllm.engine.episode_log import to_json
    from rllm.errors import ConfigError
    from rllm.gateway.sessions import new_session_id
    from rllm.sdk.supervised import Limits
    from rllm.sdk.variables import hide_operators_keys

    hide_operators_keys()
    limits = Limits(timeout_s=timeout, max_output_bytes=max_output)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {str(out.parent)!r}: make it")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out}: it is a folder: name a file in it")
    if gateway is not None and (unused := upstream or model or tokenizer or chat_template):
        raise ConfigError(
            f"{unused!r} would have no effect: --gateway {gateway} has its own model; leave one of them out"
        )
    if gateway is not None and store != DEFAULT_STORE:
        raise ConfigError(
            f"--store {store} would have no effect: --gateway {gateway} has its own store; leave one of them out"
        )
    if upstream is None:
        refuse_options_of_server(upstream_kind, tokenizer, chat_template)
    name = session or new_session_id()
    notes = {**_pairs(metadata or []), "program": PurePath(command[0]).name}
    place = (
        _own_session(_source(upstream, model, upstream_kind, tokenizer, chat_template), store, name, notes)
        if gateway is None
        else _remote_session(gateway, api_key, name, notes)
    )
    kept_here = store if gateway is None else None
    with place as opened:
        try:
            done, traces = _captured(command, limits, opened, stdout=sys.stderr if as_json else sys.stdout)
        except KeyboardInterrupt:
            with suppress(OSError):  # the terminal is gone, as SIGHUP says
                print(interrupted(name, store=kept_here), file=sys.stderr)
            raise
    code = TIMED_OUT if done.timed_out else done.exit_code if done.exit_code >= 0 else 128 - done.exit_code
    if not traces and not allow_no_calls:
        _fail_without_calls(command, opened, done, code)
    episode = episode_of(name, command, done, traces)
    text = to_json(episode.to_dict()).decode()
    if as_json:
        print(text, flush=True)
    print(shown(summary(episode, traces, done, store=kept_here)), file=sys.stderr)
    if out is not None:
        _write(out, text)
    sys.exit(code)


def _write(out: Path, text: str) -> None:
    from rllm.errors import RLLMError

    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RLLMError(
            f"--out {out} cannot be written ({error.strerror or error}): name another file; the calls are kept all the same"
        ) from error


def _captured(
    command: Sequence[str], limits: Limits, session: OpenSession, *, stdout: TextIO
) -> tuple[ProgramResult, list[Trace]]:
    """How the program ended, and the calls that it made; those which the session had before are not among them."""
    before = {trace.id for trace in session.store.by_session(session.name)}
    done = _run(command, limits, session, stdout=stdout)
    session.settle(done)
    return done, [trace for trace in session.store.by_session(session.name) if trace.id not in before]


def _fail_without_calls(command: Sequence[str], session: OpenSession, done: ProgramResult, code: int) -> NoReturn:
    from rllm.cli.run_report import why_no_calls
    from rllm.errors import CaptureError

    problem = why_no_calls(command, session.base_url, done)
    if code == 0:
        raise CaptureError(problem)
    print(shown(f"rllm: {problem}"), file=sys.stderr)
    sys.exit(code)


def _pairs(given: Sequence[str]) -> dict[str, str]:
    from rllm.errors import ConfigError

    pairs = [item.partition("=") for item in given]
    if wrong := [item for item, (key, separator, _) in zip(given, pairs, strict=True) if not key or not separator]:
        raise ConfigError(f"--metadata {wrong[0]}: use KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _source(
    upstream: str | None, model: str | None, kind: UpstreamKind, tokenizer: str | None, chat_template: Path | None
) -> ModelSource:
    from rllm.cli.model_source import embedded, key_of_server, served
    from rllm.errors import ConfigError
    from rllm.trainer.config import load_config

    if upstream is not None:
        return served(upstream, model, key_of_server(), kind, tokenizer=tokenizer, chat_template=chat_template)
    if model is None:
        raise ConfigError(
            "there is no model: name a gateway (--gateway URL), a server (--base-url URL) or a folder (--model)"
        )
    config = load_config([])
    config.model.path = model
    return embedded(config, max_concurrent=16)


@contextmanager
def _remote_session(url: str, api_key: str | None, name: str, metadata: Mapping[str, Any]) -> Iterator[OpenSession]:
    from rllm.engine.capture import LATE_TRACE_S
    from rllm.engine.remote_gateway import RemoteGateway
    from rllm.errors import ConfigError

    def settle(done: ProgramResult) -> None:
        if done.num_killed:  # it may have been in the middle of a call; that gateway serves others, and goes on
            time.sleep(LATE_TRACE_S)

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {url}: use a gateway's URL, like http://127.0.0.1:8080")
    gateway = RemoteGateway(url=url.rstrip("/").removesuffix("/v1"), api_key=api_key)
    base_url, key = gateway.open_session_with_key(name, metadata=metadata)
    yield OpenSession(name=name, base_url=base_url, key=key, store=gateway, settle=settle)


@contextmanager
def _own_session(source: ModelSource, store: str, name: str, metadata: Mapping[str, Any]) -> Iterator[OpenSession]:
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import GatewayServer
    from rllm.sdk.variables import run_key
    from rllm.store import open_store

    config = GatewayConfig.of_run(run_key(), shutdown_timeout_s=LAST_CALLS_S)
    with (
        source.upstream as upstream,
        closing(open_store(store)) as traces,
        GatewayServer(traces, upstream, config) as gateway,
    ):
        base_url, key = gateway.open_session_with_key(name, metadata=metadata)
        yield OpenSession(name=name, base_url=base_url, key=key, store=traces, settle=lambda _: gateway.stop())


def _run(command: Sequence[str], limits: Limits, session: OpenSession, *, stdout: TextIO) -> ProgramResult:
    """The program, with what it prints passed on as it comes."""
    from rllm.sdk.propagation import environment
    from rllm.sdk.supervised import run_supervised
    from rllm.sdk.variables import without_operators_keys

    return run_supervised(
        command,
        limits,
        env={**without_operators_keys(os.environ), **environment(session.base_url, api_key=session.key)},
        stdin=_stdin(),
        on_output=_Printer(stdout=stdout, stderr=sys.stderr),
    )


def _stdin() -> str | int:
    """What is piped into this command; a terminal stays here, since Ctrl-C must."""
    try:
        return "" if sys.stdin.isatty() else sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # there is none
        return ""


class _Printer:
    """Passes on what a program prints, byte by byte, for as long as somebody reads it."""

    def __init__(self, **streams: TextIO) -> None:
        self._streams = streams

    def __call__(self, name: Stream, data: bytes) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        try:
            stream.buffer.write(data)  # whatever encoding this process has
            stream.flush()
        except BrokenPipeError:  # as of `| head`; what the program does is wanted still
            del self._streams[name]
