"""The `rllm` command: what a person types, and nothing that a program would import."""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import NoReturn

import typer
from typer.main import get_command

from rllm import __version__
from rllm.cli.config import config
from rllm.cli.demo import demo
from rllm.cli.doctor import doctor
from rllm.cli.eval import evaluate
from rllm.cli.explain import explain
from rllm.cli.export import export
from rllm.cli.gateway import gateway
from rllm.cli.init import init
from rllm.cli.left_threads import end_amid_an_update, tell_of_left_threads
from rllm.cli.open_files import REMEDY, TOO_MANY, allow_many
from rllm.cli.plain_help import PlainGroup
from rllm.cli.rescore import rescore
from rllm.cli.resuming import Resumable
from rllm.cli.run import run
from rllm.cli.serve import serve
from rllm.cli.settings_command import SettingsCommand
from rllm.cli.sft import sft
from rllm.cli.stopping import CTRL_C, signals_like_ctrl_c
from rllm.cli.store import store
from rllm.cli.traces import traces
from rllm.cli.train import train
from rllm.cli.view import view
from rllm.errors import ConfigError, RLLMError, needed_to_train

app = typer.Typer(
    name="rllm",
    cls=PlainGroup,
    help="Train language agents with reinforcement learning: what you build is what you train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _unwrapped(text: str) -> str:
    """A docstring with each paragraph in one line, as help is printed, which breaks lines itself."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


_COMMANDS: dict[str, Callable[..., None]] = {
    "init": init,
    "demo": demo,
    "train": train,
    "sft": sft,
    "eval": evaluate,
    "view": view,
    "explain": explain,
    "rescore": rescore,
    "export": export,
    "serve": serve,
    "gateway": gateway,
    "run": run,
    "doctor": doctor,
    "config": config,
}
for _name, _command in _COMMANDS.items():
    app.command(
        _name,
        help=_unwrapped(_command.__doc__ or ""),
        cls=Resumable if _command in (demo, train, sft) else SettingsCommand,
        context_settings={"allow_interspersed_args": False} if _command is run else None,
    )(_command)
app.add_typer(traces)
app.add_typer(store)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rllm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train language agents with reinforcement learning: what you build is what you train."""


def main() -> None:
    """Run the command line; a mistake of the user ends with a sentence and exit code 2, a failure with 1, Ctrl-C with 130,
    SIGTERM with 143."""
    if sys.platform == "win32":
        _fail("Windows itself is not supported: install it in WSL2, where it runs as on Linux", code=2)
    # Nothing that is imported is garbage, and to look for any among it takes a seventh of the time in which a run starts.
    gc.set_threshold(100_000, 20, 100)
    if os.environ.get("NO_COLOR"):
        from typer import rich_utils

        rich_utils.COLOR_SYSTEM = None  # else it leaves out colours only, and prints its help in bold
    allow_many()
    _keep_memory_private()
    if isinstance(sys.stdout, io.TextIOWrapper):  # models write halves of characters, and what a terminal may not know
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals_like_ctrl_c():
            _run()
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code > 128:
            atexit.register(end_amid_an_update, ended.code)
        raise
    finally:
        if variables := sys.modules.get("rllm.sdk.variables"):  # else no key was hidden
            variables.restore_operators_keys()
        tell_of_left_threads()
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C prints where Python's own end was


_PR_SET_DUMPABLE = 4


def _keep_memory_private() -> None:
    """Keep other processes of this user from reading this one's memory and the environment that it was started with.

    Both may hold keys, and the programs that `rllm run` and agents start are not to have them. They lose nothing by it:
    a process that executes another program can be read again. This one leaves no core dump, and only root attaches to it.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


_command_of = cache(get_command)
"""Made once, for those who run several command lines in a process."""


def _run() -> None:
    try:
        with needed_to_train("this command"):
            _command_of(app)()
    except ConfigError as error:
        _fail(error, code=2)
    except RLLMError as error:
        _fail(error, code=1)
    except OSError as error:
        if error.errno in TOO_MANY:
            _fail(REMEDY, code=1)
        if error.errno not in _DISK:
            raise
        _fail(f"{error.filename or 'a file'} cannot be written or read: {error.strerror}", code=1)
    except KeyboardInterrupt:
        sys.exit(CTRL_C)


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG}
"""What is wrong with a disk and not with a program."""


def _fail(error: RLLMError | str, *, code: int) -> NoReturn:
    from rllm._runtime.untrusted import shown

    # It may quote names in folders and stores of others.
    print(shown("\n".join([f"rllm: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
    sys.exit(code)
