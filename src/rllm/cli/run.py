"""`rllm run`: run any program as an agent, and report its calls."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

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
    optional,
    with_options,
)
from rllm.errors import CaptureError, ConfigError, RLLMError, counted
from rllm.sdk.programs import ProgramLimits

if TYPE_CHECKING:
    from rllm.cli.inputs import ModelSource
    from rllm.engine.capture import RemoteGateway
    from rllm.sdk.programs import ProgramResult, Stream
    from rllm.store.base import TraceStore
    from rllm.types import Episode, Trace

TIMED_OUT = 124
"""Exit code after a timeout, as in timeout(1)."""
LAST_CALLS_S = 2.0
"""Seconds for calls of a finished program to end and be stored."""


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    """An open session of a gateway."""

    name: str
    base_url: str
    key: str | None
    store: TraceStore | RemoteGateway
    settle: Callable[[ProgramResult], None]
    """Waits briefly for calls of a finished program to be stored."""


@with_options
def run(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments.", metavar="-- COMMAND")],
    limits: ProgramLimits,
    session: Annotated[str | None, optional("Session of the program's calls; a new one by default.")] = None,
    gateway: Annotated[str | None, optional("URL of a running gateway.", metavar="URL")] = None,
    api_key: GatewayKey = None,
    upstream: Server = None,
    model: ModelOrName = None,
    upstream_kind: ServerKind = "vllm",
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplateFile = None,
    store: Store = DEFAULT_STORE,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Metadata of the session; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    allow_no_calls: Annotated[
        bool, typer.Option("--allow-no-calls", help="Accept a program that calls no model.")
    ] = False,
    out: Annotated[Path | None, optional("File for the episode, as JSON.")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the episode on stdout as one line of JSON; the program's output goes to stderr."
        ),
    ] = False,
) -> None:
    """Run any program with its model clients pointed at a gateway, and capture its calls, token by token.

    The model comes from --gateway, --base-url or --model. A running gateway keeps the traces; otherwise they are
    in --store. Exit code: the program's own; 124 after a timeout; 1 if it succeeded without a captured call. All
    processes that it has started end with it.
    """
    from rllm.gateway.sessions import new_session_id
    from rllm.sdk.variables import hide_operators_keys
    from rllm.store.codec import readable_json

    hide_operators_keys()
    own = {"--base-url": upstream, "--model": model, "--tokenizer": tokenizer, "--chat-template": chat_template}
    own["--store"] = None if store == DEFAULT_STORE else store
    unused = next((f"{option} {value}" for option, value in own.items() if value is not None), None)
    if gateway is not None and unused:
        raise ConfigError(f"{unused} would have no effect: --gateway {gateway} has its own; leave one of them out")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out {out}: name a file in an existing folder")
    name = session or new_session_id()
    notes = {**_pairs(metadata or []), "program": PurePath(command[0]).name}
    if gateway is None:
        source = _source(upstream, model, upstream_kind, tokenizer, chat_template)
        place, kept_here = _own_session(source, store, name, notes), store
    else:
        place, kept_here = _remote_session(gateway, api_key, name, notes), None
    with place as opened:
        try:
            before = {trace.id for trace in opened.store.by_session(name)}
            done = _run(command, limits, opened, stdout=sys.stderr if as_json else sys.stdout)
            opened.settle(done)
            traces = [trace for trace in opened.store.by_session(name) if trace.id not in before]
        except KeyboardInterrupt:
            stopped = f"rllm run: stopped; its calls are stored in session {name}"
            with suppress(OSError):  # the terminal is gone, after SIGHUP
                print("\n".join([stopped, *_place(name, kept_here)]), file=sys.stderr)
            raise
    code = TIMED_OUT if done.timed_out else done.exit_code if done.exit_code >= 0 else 128 - done.exit_code
    if not traces and not allow_no_calls:
        _fail_without_calls(why_no_calls(command, opened.base_url, done), code)
    episode = episode_of(name, command, done, traces)
    text = readable_json(episode.to_dict()).decode()
    if as_json:
        print(text, flush=True)
    print(shown(summary(episode, traces, done, store=kept_here)), file=sys.stderr)
    if out is not None:
        _write(out, text)
    sys.exit(code)


def _fail_without_calls(problem: str, code: int) -> NoReturn:
    if code == 0:
        raise CaptureError(problem)
    print(shown(f"rllm: {problem}"), file=sys.stderr)
    sys.exit(code)


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RLLMError(
            f"--out {out} cannot be written ({error.strerror or error}): name another file; the calls are stored"
        ) from error


def _pairs(given: Sequence[str]) -> dict[str, str]:
    if wrong := next((item for item in given if item.find("=") < 1), None):
        raise ConfigError(f"--metadata {wrong}: use KEY=VALUE")
    return dict(item.split("=", 1) for item in given)


def _source(
    upstream: str | None, model: str | None, kind: ServerKind, tokenizer: str | None, chat_template: Path | None
) -> ModelSource:
    from rllm.cli.inputs import embedded, key_of_server, refuse_options_of_server, served
    from rllm.trainer.config import load_config

    if upstream is not None:
        return served(upstream, model, key_of_server(), kind, tokenizer=tokenizer, chat_template=chat_template)
    refuse_options_of_server(kind, tokenizer, chat_template)
    if model is None:
        raise ConfigError(
            "no model is given: name a gateway (--gateway URL), a server (--base-url URL) or a folder (--model)"
        )
    config = load_config([])
    config.model.path = model
    return embedded(config, max_concurrent=16)


@contextmanager
def _remote_session(url: str, api_key: str | None, name: str, metadata: Mapping[str, str]) -> Iterator[OpenSession]:
    from rllm.engine.capture import LATE_TRACE_S, RemoteGateway

    def settle(done: ProgramResult) -> None:
        if done.num_killed:  # a call may be under way, and the gateway keeps running
            time.sleep(LATE_TRACE_S)

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {url}: use the address of a gateway, such as http://127.0.0.1:8080")
    gateway = RemoteGateway(url=url.rstrip("/").removesuffix("/v1"), api_key=api_key)
    base_url, key = gateway.open_session_with_key(name, metadata=metadata)
    yield OpenSession(name=name, base_url=base_url, key=key, store=gateway, settle=settle)


@contextmanager
def _own_session(source: ModelSource, store: str, name: str, metadata: Mapping[str, str]) -> Iterator[OpenSession]:
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


def _run(command: Sequence[str], limits: ProgramLimits, session: OpenSession, *, stdout: TextIO) -> ProgramResult:
    """Run the program, and pass its output on as it arrives."""
    from rllm.sdk.programs import run_supervised
    from rllm.sdk.propagation import environment
    from rllm.sdk.variables import without_operators_keys

    streams: dict[Stream, TextIO] = {"stdout": stdout, "stderr": sys.stderr}

    def pass_on(name: Stream, data: bytes) -> None:
        try:
            if stream := streams.get(name):
                stream.buffer.write(data)  # bytes, independent of this process's encoding
                stream.flush()
        except BrokenPipeError:  # as after `| head`; the program continues
            del streams[name]

    stdin: str | int = ""
    with suppress(AttributeError, OSError, ValueError):  # this process has no stdin
        if not sys.stdin.isatty():  # a terminal stays with this process, which handles Ctrl-C
            stdin = sys.stdin.fileno()
    env = {**without_operators_keys(os.environ), **environment(session.base_url, api_key=session.key)}
    return run_supervised(command, limits, env=env, stdin=stdin, on_output=pass_on)


def episode_of(session: str, command: Sequence[str], done: ProgramResult, traces: Sequence[Trace]) -> Episode:
    """Return the calls as one unscored trajectory; `info["program"]` has the program's exit code and output."""
    from rllm.engine.join import complete
    from rllm.engine.request import RolloutRequest
    from rllm.types import Episode, TerminationReason, Trajectory

    ordered = sorted(traces, key=lambda trace: trace.started_at)
    task = {"program": PurePath(command[0]).name}  # its arguments may hold secrets
    attempt = RolloutRequest(task=task, task_id=session, session_id=session, split="run", tokens_required=False)
    episode = complete(Episode(trajectories=[Trajectory()]), attempt, ordered)
    episode.info["program"] = asdict(done)
    episode.termination_reason = TerminationReason.TIMEOUT if done.timed_out else None
    return episode


def summary(episode: Episode, traces: Sequence[Trace], done: ProgramResult, *, store: str | None) -> str:
    """Return a line on the captured calls, and one for each problem; `store` is the local store, if any."""
    steps = episode.trajectories[0].steps
    num_prompt = sum(len(step.prompt_ids) for step in steps)
    num_sampled = sum(len(step.response_ids) for step in steps)
    lines = [
        f"rllm run: {counted(len(steps), 'call')} in session {episode.session_id}, {num_prompt} prompt and "
        f"{num_sampled} sampled tokens; it {_end_of(done)}",
        *_about_calls(traces),
    ]
    if done.num_dropped_bytes:
        lines.append(f"  output     {done.num_dropped_bytes} bytes are left out: raise --max-output to keep them")
    if done.num_killed:
        lines.append(f"  killed     {counted(done.num_killed, 'process', 'processes')} that were still running")
    return "\n".join([*lines, *_place(episode.session_id, store)])


def _place(session: str, store: str | None) -> list[str]:
    if store is None:
        return []
    return [f"  traces     {shlex.join(['rllm', 'traces', 'show', session, '--store', store])}"]


def _about_calls(traces: Sequence[Trace]) -> list[str]:
    from rllm.capture import side_calls
    from rllm.types import DRIFT_KEY

    def counts(reasons: Counter[str]) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())

    aside = side_calls(traces)
    drifts = Counter(str(trace.metadata[DRIFT_KEY]) for trace in traces if DRIFT_KEY in trace.metadata)
    errors = Counter(trace.error for trace in traces if trace.error)
    lines = []
    if aside:
        lines.append(f"  left out   {counted(len(aside), 'side call')} ({counts(Counter(aside.values()))})")
    if drifts:
        lines.append(f"  drift      {counted(sum(drifts.values()), 'call')} not on earlier tokens ({counts(drifts)})")
    if errors:
        lines.append(f"  no tokens  {counted(sum(errors.values()), 'call')}: {next(iter(errors))}")
    return lines


def _end_of(done: ProgramResult) -> str:
    how = "timed out and was stopped" if done.timed_out else f"ended with exit code {done.exit_code}"
    return f"{how} after {done.duration_s:.1f} s"


def why_no_calls(command: Sequence[str], base_url: str, done: ProgramResult) -> str:
    """Return the message for a program without a captured call."""
    from rllm.sdk.propagation import hints_for

    remedies = [
        *hints_for(modules=(), programs=[PurePath(item).name for item in command]),
        f"make it read OPENAI_BASE_URL or OPENAI_API_BASE ({base_url}), or ANTHROPIC_BASE_URL "
        f"({base_url.removesuffix('/v1')}), which is set for it",
        "make it send OPENAI_API_KEY, which is set for its session",
        "or pass --allow-no-calls if it calls no model",
    ]
    problem = f"{command[0]} {_end_of(done)} and made no model call that reached the gateway in its session"
    return f"{problem}: {'; '.join(remedies)}"
