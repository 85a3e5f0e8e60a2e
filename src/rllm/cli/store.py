"""`rllm store`: what is done to a whole trace store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rllm.cli import terminal
from rllm.cli.options import DEFAULT_STORE, KeepDays, MaxGb
from rllm.cli.plain_help import PlainCommand, PlainGroup
from rllm.errors import ConfigError, counted

if TYPE_CHECKING:
    from rllm.store.base import TraceStore

store = typer.Typer(name="store", cls=PlainGroup, help="Copy and prune trace stores.", no_args_is_help=True)


def open_existing(url: str, *, read_only: bool = True) -> TraceStore:
    """Open a store that is there.

    Raises:
        ConfigError: if the URL names no store, a directory, or a file that does not exist.
    """
    from pathlib import Path

    from rllm.store import open_store, path_of

    path = path_of(url)
    if path is None and not url.startswith("postgres"):
        raise ConfigError(f"store={url!r} is empty whenever it is opened: name a file or a database")
    if path is not None and not Path(path).expanduser().exists():
        raise ConfigError(f"store={url!r}: there is no such file")
    return open_store(url, read_only=read_only)


@store.command(cls=PlainCommand)
def migrate(
    source: Annotated[str, typer.Argument(help="Store to copy from: a file or a URL.", metavar="SRC")],
    target: Annotated[str, typer.Argument(help="Store to copy to; it is made if it is not there.", metavar="DST")],
) -> None:
    """Copy every session, with its traces and credits, from one store to another; begun again, it goes on.

    Each session is read back and compared. The source stays as it is.
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
        f"{copied.num_skipped} {'was' if copied.num_skipped == 1 else 'were'} there already"
    )


@store.command(cls=PlainCommand)
def prune(
    url: Annotated[str, typer.Argument(help="Store: a file or a URL.", metavar="STORE")] = DEFAULT_STORE,
    keep_days: KeepDays = None,
    max_gb: MaxGb = None,
) -> None:
    """Delete old sessions, by age, by size, or both."""
    from rllm.store.maintenance import Retention
    from rllm.store.maintenance import prune as delete_old

    retention = Retention(keep_days=keep_days, max_gb=max_gb)
    if not retention:
        raise ConfigError("nothing says what to delete: give --keep-days, --max-gb, or both")
    with open_existing(url, read_only=False) as opened:
        pruned = delete_old(opened, retention)
    print(f"{pruned} deleted")
