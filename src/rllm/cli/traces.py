"""`rllm traces`: look into a trace store, take traces out of it, and delete them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rllm.cli import terminal
from rllm.cli.options import DEFAULT_STORE, OnlyJson, Store
from rllm.cli.plain_help import PlainCommand, PlainGroup
from rllm.cli.store import open_existing
from rllm.errors import ConfigError, counted

if TYPE_CHECKING:
    from rllm.store.base import SessionInfo, TraceStore
    from rllm.types import Trace
    from rllm.viewer.messages import Said

traces = typer.Typer(
    name="traces", cls=PlainGroup, help="List, show, export and delete captured calls.", no_args_is_help=True
)


@traces.command("list", cls=PlainCommand)
def list_sessions(
    url: Store = DEFAULT_STORE,
    limit: Annotated[int, typer.Option(help="How many to list.", min=1)] = 20,
    offset: Annotated[int, typer.Option(help="How many of the newest to leave out.", min=0)] = 0,
    as_json: OnlyJson = False,
) -> None:
    """List sessions, newest first."""
    from rich.table import Table
    from rich.text import Text

    with open_existing(url) as store:
        found = store.sessions(limit=limit, offset=offset)
    if as_json:
        _print_json([_session_to_dict(info) for info in found])
        return
    table = Table("session", "began", "calls", "metadata")
    for info in found:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.created_at))
        table.add_row(Text(info.id), began, str(info.num_traces), Text(_short(info.metadata)))
    terminal.console(wide=True).print(table)


@traces.command(cls=PlainCommand)
def show(
    session: Annotated[str, typer.Argument(help="Session, or the id of a call.")],
    trace: Annotated[str | None, typer.Argument(help="One call of the session, by its id.", show_default=False)] = None,
    url: Store = DEFAULT_STORE,
    as_json: OnlyJson = False,
) -> None:
    """Show the calls of a session, or one of them with its messages."""
    from rich.text import Text

    from rllm.store.codec import plain_text
    from rllm.viewer.messages import said

    with open_existing(url) as store:
        if trace is None and store.session(session) is None and (owner := store.session_of(session)) is not None:
            session, trace = owner, session
        found = _known(store, session)
        calls = store.by_session(found.id) if trace is None else _call_of(store, session, trace)
    if as_json:
        _print_json(calls[0].to_dict() if trace else [call.to_dict() for call in calls])
        return
    console = terminal.console(wide=True)
    if trace is None:
        console.print(Text.assemble((session, "bold"), "  ", _short(found.metadata)))
        console.print(_table_of(calls))
        return
    console.print(_table_of(calls))
    for message in [*calls[0].messages, calls[0].response]:
        told = said(message)
        console.print(Text.assemble((plain_text(told.role), "bold"), "  ", _words_of(told)))


def _call_of(store: TraceStore, session: str, trace: str) -> list[Trace]:
    found = store.trace(session, trace)
    if found is None:
        raise ConfigError(f"trace={trace!r} is not in session {session!r}: `rllm traces show {session}` lists them")
    return [found]


@traces.command(cls=PlainCommand)
def export(
    path: Annotated[Path, typer.Argument(help="File to write; .jsonl or .parquet.")],
    url: Store = DEFAULT_STORE,
    session: Annotated[
        list[str] | None, typer.Option(help="Only this session; may be repeated.", show_default=False)
    ] = None,
    kind: Annotated[
        Literal["jsonl", "parquet"] | None,
        typer.Option("--format", help="What to write, whatever the file's name says.", show_default=False),
    ] = None,
) -> None:
    """Write traces to a file: one JSON object a line, or Parquet."""
    from rllm.store.maintenance import export_traces

    suffix = path.suffix.removeprefix(".")
    chosen = kind or suffix
    if chosen not in ("jsonl", "parquet"):
        raise ConfigError(f"path={str(path)!r} ends in neither .jsonl nor .parquet: say which with --format")
    with open_existing(url) as store:
        sessions = [_known(store, name) for name in dict.fromkeys(session)] if session else None
        count = export_traces(_every_trace(store, sessions), path, chosen)  # type: ignore[arg-type]
    print(f"{counted(count, 'trace')} written to {path}")


@traces.command(cls=PlainCommand)
def delete(
    session: Annotated[list[str], typer.Argument(help="Sessions.")],
    url: Store = DEFAULT_STORE,
) -> None:
    """Delete sessions with their traces. By age or size: `rllm store prune`."""
    from rllm.store.maintenance import delete_sessions

    with open_existing(url, read_only=False) as store:
        known = [_known(store, name).id for name in dict.fromkeys(session)]  # all of them, before anything is deleted
        pruned = delete_sessions(store, known)
    print(f"{pruned} deleted")


def _known(store: TraceStore, session_id: str) -> SessionInfo:
    found = store.session(session_id)
    if found is None:
        some = ", ".join(info.id for info in store.sessions(limit=5))
        others = f"; the latest there are {some}" if some else ", which is empty"
        raise ConfigError(f"session={session_id!r} is not in the store{others}")
    return found


def _every_trace(store: TraceStore, sessions: list[SessionInfo] | None) -> Iterator[Trace]:
    from rllm.store.base import every_session

    for info in every_session(store, oldest_first=True) if sessions is None else sessions:
        yield from store.by_session(info.id)


def _table_of(calls: list[Trace]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from rllm.viewer.messages import said

    table = Table("call", "model", "tokens", "version", "ended", "answer")
    for call in calls:
        ended = call.error or call.finish_reason or ""
        version = "" if call.weight_version is None else str(call.weight_version)
        size = f"{len(call.prompt_ids)} + {len(call.response_ids)}"
        table.add_row(
            Text(call.id), Text(call.model), size, version, Text(ended), Text(_words_of(said(call.response))[:80])
        )
    return table


def _words_of(told: Said) -> str:
    from rllm.store.codec import plain_text

    return plain_text(" ".join([told.text, *(f"[calls {name}]" for name, _ in told.tools)]).strip())


def _session_to_dict(info: SessionInfo) -> dict[str, Any]:
    return {"id": info.id, "created_at": info.created_at, "num_traces": info.num_traces, "metadata": info.metadata}


def _short(metadata: dict[str, Any]) -> str:
    from rllm.store.codec import plain_text
    from rllm.types import OUTCOME_KEY

    told = {
        name: value for name, value in metadata.items() if name != OUTCOME_KEY
    }  # pages of it; `rllm view` shows them
    return plain_text(", ".join(f"{name}={value}" for name, value in told.items()))[:120]


def _print_json(value: Any) -> None:
    from rllm.store.codec import any_to_json

    print(any_to_json(value).decode())
