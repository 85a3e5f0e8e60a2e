"""`rllm traces` and `rllm store`: list, show, export, delete, copy and prune captured calls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from rllm.cli import terminal
from rllm.cli.options import DEFAULT_STORE, OnlyJson, Store, StrictCommand, optional, with_options
from rllm.errors import ConfigError, counted
from rllm.store.codec import any_to_json, plain_text
from rllm.store.maintenance import ExportFormat, Retention
from rllm.types import OUTCOME_KEY

if TYPE_CHECKING:
    from rllm.store.base import SessionInfo, TraceStore
    from rllm.types import JSONMapping, Trace
    from rllm.viewer.texts import MessageParts

store = typer.Typer(name="store", rich_markup_mode=None, help="Copy and prune trace stores.", no_args_is_help=True)


def open_existing(url: str, *, read_only: bool = True) -> TraceStore:
    """Open an existing store."""
    from rllm.store import open_store, path_of

    path = path_of(url)
    if path is None and not url.startswith("postgres"):
        raise ConfigError(f"store={url!r} is not kept on disk: name a file or a database")
    if path is not None and not Path(path).expanduser().exists():
        raise ConfigError(f"store={url!r}: no such file; check the path")
    return open_store(url, read_only=read_only)


@store.command(cls=StrictCommand)
def migrate(
    source: Annotated[str, typer.Argument(help="Store to copy from: a file or a URL.", metavar="SRC")],
    target: Annotated[str, typer.Argument(help="Store to copy to; created if needed.", metavar="DST")],
) -> None:
    """Copy every session, with its traces and credits, from one store to another; run again, it continues.

    Each session is read back and compared. The source is not changed.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from rllm.store import open_store
    from rllm.store.base import every_session
    from rllm.store.maintenance import CopyProgress, copy_store

    if source == target:
        raise ConfigError(f"SRC and DST are both {source!r}: name two stores")
    console = terminal.console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("sessions")
    with (
        open_existing(source) as read,
        open_store(target) as written,
        Progress(*columns, console=console, disable=not console.is_interactive) as bar,
    ):
        task = bar.add_task("copying", total=sum(1 for _ in every_session(read, oldest_first=True)))

        def show(copied: CopyProgress) -> None:
            bar.update(task, completed=copied.num_sessions + copied.num_skipped)

        copied = copy_store(read, written, show)
    print(
        f"{counted(copied.num_sessions, 'session')} with {counted(copied.num_traces, 'trace')} copied and compared; "
        f"{copied.num_skipped} {'was' if copied.num_skipped == 1 else 'were'} already there"
    )


@store.command(cls=StrictCommand)
@with_options
def prune(
    retention: Retention,
    url: Annotated[str, typer.Argument(help="Store: a file or a URL.", metavar="STORE")] = DEFAULT_STORE,
) -> None:
    """Delete old sessions, by age, by size, or both."""
    from rllm.store.maintenance import prune as delete_old

    if not retention:
        raise ConfigError("no limit is given: use --keep-days, --max-gb, or both")
    with open_existing(url, read_only=False) as opened:
        pruned = delete_old(opened, retention)
    print(f"{pruned} deleted")


traces = typer.Typer(
    name="traces", rich_markup_mode=None, help="List, show, export and delete captured calls.", no_args_is_help=True
)


@traces.command("list", cls=StrictCommand)
def list_sessions(
    url: Store = DEFAULT_STORE,
    limit: Annotated[int, typer.Option(help="Number of sessions to list.", min=1)] = 20,
    offset: Annotated[int, typer.Option(help="Number of newest sessions to skip.", min=0)] = 0,
    as_json: OnlyJson = False,
) -> None:
    """List sessions, newest first."""
    with open_existing(url) as store:
        found = store.sessions(limit=limit, offset=offset)
    if as_json:
        shown = ("id", "created_at", "num_traces", "metadata")
        print(any_to_json([{name: getattr(info, name) for name in shown} for info in found]).decode())
        return
    began = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.created_at)) for info in found)
    rows = [(info.id, at, info.num_traces, _short(info.metadata)) for info, at in zip(found, began, strict=True)]
    terminal.print_table(["session", "began", "calls", "metadata"], rows)


@traces.command(cls=StrictCommand)
def show(
    session: Annotated[str, typer.Argument(help="Session, or the id of a call.")],
    trace: Annotated[str | None, typer.Argument(help="One call of the session, by its id.", show_default=False)] = None,
    url: Store = DEFAULT_STORE,
    as_json: OnlyJson = False,
) -> None:
    """Show the calls of a session, or one of them with its messages."""
    from rich.text import Text

    from rllm.viewer.texts import message_parts

    with open_existing(url) as store:
        if trace is None and store.session(session) is None and (owner := store.session_of(session)) is not None:
            session, trace = owner, session
        found = _known(store, session)
        calls = store.by_session(found.id)
        if trace is not None:
            calls = [call for call in calls if call.id == trace]
            if not calls:
                raise ConfigError(
                    f"trace={trace!r} is not in session {session!r}: `rllm traces show {session}` lists them"
                )
    if as_json:
        print(any_to_json(calls[0].to_dict() if trace else [call.to_dict() for call in calls]).decode())
        return
    console = terminal.console(wide=True)
    if trace is None:
        console.print(Text.assemble((session, "bold"), "  ", _short(found.metadata)))
    _print_calls(calls)
    for message in [] if trace is None else [*calls[0].messages, calls[0].response]:
        parts = message_parts(message)
        console.print(Text.assemble((plain_text(parts.role), "bold"), "  ", _words_of(parts)))


@traces.command(cls=StrictCommand)
def export(
    path: Annotated[Path, typer.Argument(help="File to write; .jsonl or .parquet.")],
    url: Store = DEFAULT_STORE,
    session: Annotated[list[str] | None, optional("Only this session; may be repeated.")] = None,
    kind: Annotated[ExportFormat | None, optional("Format, if the file's name does not show it.", "--format")] = None,
) -> None:
    """Write traces to a file: one JSON object a line, or Parquet."""
    from rllm.store.base import every_session
    from rllm.store.maintenance import export_traces

    chosen = kind or next((item for item in get_args(ExportFormat) if path.suffix == f".{item}"), None)
    if chosen is None:
        raise ConfigError(f"path={str(path)!r} ends in neither .jsonl nor .parquet: choose one with --format")
    with open_existing(url) as store:
        known = [_known(store, name) for name in dict.fromkeys(session or ())]
        sessions = known or every_session(store, oldest_first=True)
        count = export_traces((call for info in sessions for call in store.by_session(info.id)), path, chosen)
    print(f"{counted(count, 'trace')} written to {path}")


@traces.command(cls=StrictCommand)
def delete(
    session: Annotated[list[str], typer.Argument(help="Sessions to delete.")],
    url: Store = DEFAULT_STORE,
) -> None:
    """Delete sessions with their traces. By age or size: `rllm store prune`."""
    from rllm.store.maintenance import delete_sessions

    with open_existing(url, read_only=False) as store:
        known = [_known(store, name).id for name in dict.fromkeys(session)]  # all, before any is deleted
        pruned = delete_sessions(store, known)
    print(f"{pruned} deleted")


def _known(store: TraceStore, session_id: str) -> SessionInfo:
    found = store.session(session_id)
    if found is None:
        some = ", ".join(info.id for info in store.sessions(limit=5))
        others = f"; the latest there are {some}" if some else ", which is empty"
        raise ConfigError(f"session={session_id!r} is not in the store{others}")
    return found


def _print_calls(calls: list[Trace]) -> None:
    from rllm.viewer.texts import message_parts

    rows = [
        (
            call.id,
            call.model,
            f"{len(call.prompt_ids)} + {len(call.response_ids)}",
            "" if call.weight_version is None else call.weight_version,
            call.error or call.finish_reason or "",
            _words_of(message_parts(call.response))[:80],
        )
        for call in calls
    ]
    terminal.print_table(["call", "model", "tokens", "version", "ended", "answer"], rows)


def _words_of(parts: MessageParts) -> str:
    return plain_text(" ".join([parts.text, *(f"[calls {name}]" for name, _ in parts.tools)]).strip())


def _short(metadata: JSONMapping) -> str:
    # The outcome is long; `rllm view` shows it.
    shown = (f"{name}={value}" for name, value in metadata.items() if name != OUTCOME_KEY)
    return plain_text(", ".join(shown))[:120]
