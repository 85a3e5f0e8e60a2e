"""How a command ends before its time: on Ctrl-C, or on a signal that means the same, saying what is kept."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rllm._runtime.files import from_here
from rllm.cli.terminal import command

if TYPE_CHECKING:
    from rich.console import Console

    from rllm.trainer.resume import StartingPoint

CTRL_C = 128 + signal.SIGINT
"""The exit code of a command that was interrupted."""
_LIKE_CTRL_C = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_originals: dict[int, Any] = {}
"""What signals do by themselves that are like Ctrl-C now."""


def _as_originally() -> None:
    """A fork of ours, such as an agent's `multiprocessing.Process`, ends when it is terminated: it has no work of ours to save."""
    for number, handler in _originals.items():
        signal.signal(number, handler)
    _originals.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_as_originally)


@contextmanager
def signals_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt what is inside as Ctrl-C does; only the exit code tells which it was: 143 or 129.

    One that is ignored stays so, as under nohup. Forks of this process are left out.
    """
    heard: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):
            raise KeyboardInterrupt
        on_ctrl_c(signal.SIGINT, frame)  # asyncio's own, where a loop runs, which lets the work end in order

    before = {number: handler for number in _LIKE_CTRL_C if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    outermost = not _originals
    if outermost:
        _originals.update(before)
    for number in before:
        signal.signal(number, interrupt)
    try:
        with _ctrl_c_as_asyncio_knows_it():
            yield
    except SystemExit as ended:
        if heard and ended.code == CTRL_C:
            raise SystemExit(128 + heard[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if outermost:
            _originals.clear()


@contextmanager
def _ctrl_c_as_asyncio_knows_it() -> Iterator[None]:
    """Ctrl-C has Python's own handler: asyncio makes its handler, which the other signals need, only in the place of that one.
    Where Ctrl-C is ignored, as in the background of a script, it is blocked instead."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # takes away what waits, too
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def tell_stopped(console: Console, run_dir: Path, again: Sequence[str], *, num_steps: int) -> None:
    """Say what is kept of a training run that was stopped; `again` are the arguments that go on with it."""
    console.print(f"\nStopped. {what_is_kept(run_dir, again, num_steps=num_steps)}", soft_wrap=True, markup=False)


def what_is_kept(run_dir: Path, again: Sequence[str], *, num_steps: int, own_code: bool = False) -> str:
    """Return what a training run that ended early leaves, and the command that continues it.

    Args:
        run_dir: folder of the run.
        again: arguments of the command that continues it.
        num_steps: steps that the run was to take.
        own_code: an error in the user's code ended the run; a resumed run would meet it again unless it is corrected.
    """
    if not (run_dir / "config.yaml").is_file():
        return "The run had not begun, so there is nothing to keep; the same command starts it."
    from rllm.trainer.checkpoint import Checkpoints, read_state
    from rllm.trainer.resume import StartingPoint

    latest = Checkpoints(run_dir, keep=1).latest()
    saved = StartingPoint(checkpoint=latest, state={} if latest is None else read_state(latest))
    if saved.has_done(num_steps):
        return f"All is done and saved in {from_here(run_dir)}."
    kept = _kept(from_here(run_dir), saved, num_steps)
    if own_code and latest is None:
        return f"{kept}\nCorrect the code, then run the same command again."
    how = "Once the code is corrected, continue with" if own_code else "Go on with"
    return f"{kept}\n{how}: {command()} {shlex.join(again)}"


def _kept(shown: Path, saved: StartingPoint, num_steps: int) -> str:
    if saved.steps_done:
        return f"{saved.steps_done} of {num_steps} steps are saved in {shown}; what came after them is made again."
    kept = "settings" if saved.checkpoint is None else "settings and first evaluation"
    return f"No step is saved, so nothing is learned; {shown} keeps its {kept}."
