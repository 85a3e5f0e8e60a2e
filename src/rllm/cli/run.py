"""`rllm run`: start any program as an agent, and take back what it did."""

from __future__ import annotations

import codecs
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

if TYPE_CHECKING:
    from rllm.cli.model_source import ModelSource
    from rllm.engine.capture import SessionTraces
    from rllm.gateway.upstream import UpstreamKind
    from rllm.sdk.supervised import Limits, ProgramResult, Stream

TIMED_OUT = 124
"""The exit code where the time was up, as of timeout(1)."""


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    """A session of a gateway that is there."""

    base_url: str
    key: str | None
    store: SessionTraces


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="-- COMMAND...")],
    session: Annotated[
        str | None, typer.Option(help="Session that its calls are filed under; else a new one.", show_default=False)
    ] = None,
    gateway: Annotated[
        str | None, typer.Option(help="Gateway that is running already.", metavar="URL", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of that gateway.", envvar="RLLM_GATEWAY_API_KEY", show_default=False),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            help="OpenAI-compatible server; its key comes from RLLM_UPSTREAM_API_KEY or OPENAI_API_KEY.",
            metavar="URL",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hub id; with --upstream, the server's name for it.", show_default=False),
    ] = None,
    upstream_kind: Annotated[
        Literal["vllm", "openai"],
        typer.Option(
            help="vllm: the server takes extra fields (also SGLang, rllm). openai: it rejects unknown fields."
        ),
    ] = "vllm",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of the served model: later turns then go on from the very tokens that were sampled.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        str, typer.Option(help="Where traces are kept, unless --gateway keeps them.", metavar="URL")
    ] = "sqlite:///traces.db",
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which it is ended, with exit code 124.", show_default=False)
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

    The model is that of --gateway, of --upstream or of --model. Exit code: the program's own; 124 if its time was up; 1 if it
    ended well and no call of it arrived. All processes that it has started end with it.
    """
    from rllm.cli.run_report import episode_of, summary, why_no_calls
    from rllm.engine.episode_log import to_json
    from rllm.errors import CaptureError, ConfigError
    from rllm.gateway.sessions import new_session_id
    from rllm.sdk.supervised import Limits

    limits = Limits(timeout_s=timeout, max_output_bytes=max_output)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {str(out.parent)!r}: make it")
    if gateway is not None and (unused := upstream or model or tokenizer):
        raise ConfigError(
            f"{unused!r} would have no effect: --gateway {gateway} has its own model; leave one of them out"
        )
    name = session or new_session_id()
    notes = {**_pairs(metadata or []), "command": shlex.join(command)}
    with _terminated_like_interrupted(), ExitStack() as stack:
        if gateway is not None:
            opened = _remote_session(gateway, api_key, name, notes)
        else:
            source = _source(upstream, model, upstream_kind, tokenizer)
            opened = stack.enter_context(_own_session(source, store, name, notes))
        before = {trace.id for trace in opened.store.by_session(name)}
        done = _run(command, limits, opened, stdout=sys.stderr if as_json else sys.stdout)
        traces = [trace for trace in opened.store.by_session(name) if trace.id not in before]
    code = TIMED_OUT if done.timed_out else done.exit_code if done.exit_code >= 0 else 128 - done.exit_code
    if not traces and not allow_no_calls:
        problem = why_no_calls(command, opened.base_url, done)
        if code == 0:
            raise CaptureError(problem)
        print(f"rllm: {problem}", file=sys.stderr)
        sys.exit(code)
    episode = episode_of(name, command, done, traces)
    text = to_json(episode.to_dict()).decode()
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text, flush=True)
    print(summary(episode, traces, done, store=store if gateway is None else None), file=sys.stderr)
    sys.exit(code)


def _pairs(given: Sequence[str]) -> dict[str, str]:
    from rllm.errors import ConfigError

    pairs = [item.partition("=") for item in given]
    if wrong := [item for item, (key, separator, _) in zip(given, pairs, strict=True) if not key or not separator]:
        raise ConfigError(f"--metadata {wrong[0]}: use KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _source(upstream: str | None, model: str | None, kind: UpstreamKind, tokenizer: str | None) -> ModelSource:
    from rllm.cli.model_source import embedded, key_of_server, served
    from rllm.errors import ConfigError
    from rllm.trainer.config import load_config

    if upstream is not None:
        return served(upstream, model, key_of_server(), kind, tokenizer=tokenizer)
    if model is None:
        raise ConfigError(
            "there is no model: name a gateway (--gateway URL), a server (--upstream URL) or a folder (--model)"
        )
    config = load_config([])
    config.model.path = model
    return embedded(config, max_concurrent=16)


def _remote_session(url: str, api_key: str | None, name: str, metadata: Mapping[str, Any]) -> OpenSession:
    from rllm.engine.remote_gateway import RemoteGateway
    from rllm.errors import ConfigError

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {url}: use a gateway's URL, like http://127.0.0.1:8080")
    gateway = RemoteGateway(url=url.rstrip("/").removesuffix("/v1"), api_key=api_key)
    base_url, key = gateway.open_session_with_key(name, metadata=metadata)
    return OpenSession(base_url=base_url, key=key, store=gateway)


@contextmanager
def _own_session(source: ModelSource, store: str, name: str, metadata: Mapping[str, Any]) -> Iterator[OpenSession]:
    from rllm.gateway.config import GatewayConfig
    from rllm.gateway.server import GatewayServer
    from rllm.store import open_store

    with (
        source.upstream as upstream,
        closing(open_store(store)) as traces,
        GatewayServer(traces, upstream, GatewayConfig(shutdown_timeout_s=1.0)) as gateway,
    ):
        yield OpenSession(base_url=gateway.open_session(name, metadata=metadata), key=None, store=traces)


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
    """Passes on what a program prints, for as long as somebody reads it."""

    def __init__(self, **streams: TextIO) -> None:
        self._streams = streams
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: decoder("replace") for name in streams}

    def __call__(self, name: Stream, data: bytes) -> None:
        stream = self._streams.get(name)
        if stream is None:
            return
        try:
            stream.write(self._decoders[name].decode(data))
            stream.flush()
        except BrokenPipeError:  # as of `| head`; what the program does is wanted still
            del self._streams[name]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP end this command as Ctrl-C does, with its program, and not without."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
