"""The `rllm` command line. Programs import nothing from here.

One module a command or two: `train` (train, sft), `demo`, `eval`, `run`, `serving` (gateway, serve, view), `episodes`
(explain, export, rescore), `stores` (traces, store), `listing` (list), `tasks` and `project` (init, config, doctor).
They share `options` (also those generated from config classes), `terminal` (output, Ctrl-C), `display` (progress and
reports), `inputs` (agents, tasks, models) and `training` (settings, runs, `--resume`). Read `train` first.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import io
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import typer
from typer.main import get_command

from rllm import __version__
from rllm.cli.demo import demo
from rllm.cli.episodes import explain, export, rescore
from rllm.cli.eval import evaluate
from rllm.cli.listing import list_names
from rllm.cli.options import StrictCommand
from rllm.cli.project import config, doctor, init
from rllm.cli.run import run
from rllm.cli.serving import gateway, serve, view
from rllm.cli.stores import store, traces
from rllm.cli.tasks import tasks
from rllm.cli.terminal import CTRL_C, exit_during_update, signals_like_ctrl_c
from rllm.cli.train import sft, train
from rllm.errors import ConfigError, RLLMError, needed_to_train

app = typer.Typer(
    name="rllm",
    help="Train language agents with reinforcement learning: what you build is what you train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    "list": list_names,
    "doctor": doctor,
    "config": config,
}
for _name, _command in _COMMANDS.items():
    app.command(
        _name,
        short_help=" ".join((_command.__doc__ or "").partition("\n\n")[0].split()),  # the default cuts it off
        cls=StrictCommand,
        context_settings={"allow_interspersed_args": False} if _command is run else None,
    )(_command)
app.add_typer(traces)
app.add_typer(store)
app.add_typer(tasks)


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
    """Run the command line.

    Exit codes: 2 for a mistake of the user, 1 for a failure, each with a message; 130 for Ctrl-C, 143 for SIGTERM.
    """
    if sys.platform == "win32":
        _fail("Windows itself is not supported: install it in WSL2, where it runs as on Linux", code=2)
    _raise_file_limit()
    if sys.platform == "linux":
        # Keep other processes of this user from reading this one's memory and its original environment. Both may hold
        # keys, which programs started by `rllm run` and by agents must not get. The setting ends in a process that
        # executes another program. This process leaves no core dump, and only root can attach a debugger to it.
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    if isinstance(sys.stdout, io.TextIOWrapper):  # models write text that a terminal may not be able to encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals_like_ctrl_c():
            _run()
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code > 128:
            atexit.register(exit_during_update, ended.code)
        raise
    finally:
        if variables := sys.modules.get("rllm.sdk.variables"):  # otherwise no key was hidden
            variables.restore_operators_keys()
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)  # otherwise Ctrl-C prints a traceback


MAX_OPEN_FILES = 65_536
_TOO_MANY_FILES = (
    "too many files and connections are open: an agent that creates a client, a file or a socket in each rollout "
    "should close it there, as `with OpenAI() as client:` does; or raise the limit (ulimit -n)"
)


def _raise_file_limit() -> None:
    """Raise the soft limit on open files, which is often 1024: each model call takes two."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS grants less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run() -> None:
    try:
        with needed_to_train("this command"):
            get_command(app)()
    except ConfigError as error:
        _fail(error, code=2)
    except RLLMError as error:
        _fail(error, code=1)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            _fail(_TOO_MANY_FILES, code=1)
        if error.errno not in _DISK:
            raise
        _fail(f"{error.filename or 'a file'} cannot be written or read: {error.strerror}", code=1)
    except KeyboardInterrupt:
        sys.exit(CTRL_C)


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG}
"""Errors of a disk, not of a program."""


def _fail(error: RLLMError | str, *, code: int) -> NoReturn:
    from rllm._runtime.untrusted import shown

    # The message may quote names from folders and stores of other people.
    print(shown("\n".join([f"rllm: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
    sys.exit(code)
