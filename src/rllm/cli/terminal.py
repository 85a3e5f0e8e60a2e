"""Output of commands, and their end by Ctrl-C or a signal."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rllm._runtime.files import from_here
from rllm._runtime.threads import BACKEND_THREAD
from rllm.types import JSONMapping

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False, wide: bool = False) -> Console:
    """Return a console on stdout or stderr.

    It prints plain text without a terminal or if `NO_COLOR` is set. Without a terminal, a `wide` one does not cut
    tables.
    """
    from rllm.tracking.console import LastingConsole

    stream = sys.stderr if stderr else sys.stdout
    found = LastingConsole(stream, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if wide and not found.is_terminal:
        found.width = 200
    return found


def loading(model: str) -> str:
    """Return `loading MODEL (its size)`, for a line printed before the slow import of torch."""
    from rllm.config.sizes import size_in_words

    about = size_in_words(model)
    return f"loading {model} ({about})" if about else f"loading {model}"


def print_json(values: JSONMapping) -> None:
    """Print the last line of `--json`."""
    print(json.dumps(values), flush=True)


def print_table(
    heads: Iterable[str], rows: Iterable[Iterable[object]], *, title: str | None = None, on: Console | None = None
) -> None:
    """Print a table, by default on stdout; cells are shown as plain text."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    (on or console(wide=True)).print(table)


def print_line(text: str) -> None:
    """Print a line of a server, which keeps running when the reader of its output has gone, as after `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The text is still in the stream's buffer, and would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


CTRL_C = 128 + signal.SIGINT
"""Exit code of an interrupted command."""
_LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)
_originals: dict[signal.Signals, signal._HANDLER] = {}
"""Original handlers of signals that are handled like Ctrl-C now."""


def _restore_handlers() -> None:
    """Let a fork of this process, such as an agent's `multiprocessing.Process`, end when it is terminated."""
    for number, handler in _originals.items():
        signal.signal(number, handler)
    _originals.clear()


os.register_at_fork(after_in_child=_restore_handlers)


@contextmanager
def signals_like_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C; only the exit code differs: 143 or 129.

    An ignored signal stays ignored, as under nohup. Forks of this process are not affected.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):
            raise KeyboardInterrupt
        on_ctrl_c(signal.SIGINT, frame)  # asyncio's handler in a running loop, which ends the work in order

    before = {number: handler for number in _LIKE_CTRL_C if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    outermost = not _originals
    if outermost:
        _originals.update(before)
    for number in before:
        signal.signal(number, interrupt)
    try:
        with _default_ctrl_c():
            yield
    except SystemExit as ended:
        if received and ended.code == CTRL_C:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if outermost:
            _originals.clear()


@contextmanager
def _default_ctrl_c() -> Iterator[None]:
    """Install Python's own handler of Ctrl-C, since asyncio replaces only that one by its own.

    If Ctrl-C is ignored, as in the background of a script, it is blocked instead.
    """
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_DFL, signal.SIG_IGN):
        yield
        return
    if before == signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # also discards a pending one
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def print_stopped(console: Console, run_dir: Path, again: Sequence[str], *, num_steps: int) -> None:
    """Print the state of a stopped training run; `again` are the arguments that resume it."""
    console.print(f"\nStopped. {saved_state(run_dir, again, num_steps=num_steps)}", soft_wrap=True, markup=False)


def saved_state(run_dir: Path, again: Sequence[str], *, num_steps: int, own_code: bool = False) -> str:
    """Describe what a training run that ended early has saved, and the command that resumes it.

    Args:
        run_dir: folder of the run.
        again: arguments of the command that resumes it.
        num_steps: steps that the run was to take.
        own_code: an error in the user's code ended the run; it must be fixed before the run is resumed.
    """
    if not (run_dir / "config.yaml").is_file():
        return "The run had not started, so there is nothing to keep; run the same command again."
    from rllm.trainer.checkpoint import Checkpoints, read_state
    from rllm.trainer.resume import StartingPoint

    latest = Checkpoints(run_dir, keep=1).latest()
    saved = StartingPoint(checkpoint=latest, state={} if latest is None else read_state(latest))
    shown = from_here(run_dir)
    if saved.has_done(num_steps):
        return f"Everything is done and saved in {shown}."
    kept = f"{saved.steps_done} of {num_steps} steps are saved in {shown}; later work is repeated."
    if not saved.steps_done:
        what = "settings" if latest is None else "settings and first evaluation"
        kept = f"No step is saved, so nothing is learned; {shown} keeps its {what}."
    if own_code and latest is None:
        return f"{kept}\nFix the code, then run the same command again."
    how = "Once the code is fixed, resume with" if own_code else "Resume with"
    return f"{kept}\n{how}: rllm {shlex.join(again)}"


def exit_during_update(code: int) -> None:
    """End the process if an abandoned update still runs; called at exit.

    Python would end its thread inside torch's code, which would abort with a signal instead of this exit code.
    """
    if any(thread.name == BACKEND_THREAD for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
