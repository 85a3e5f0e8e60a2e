"""What a terminal is shown, in a real pseudo-terminal, and what a pipe gets."""

import os
import pty
import re
import subprocess
import sys

import pytest

from rllm.cli import terminal

STYLE = re.compile(r"\x1b\[[0-9;]*m")
SAYS = """
import sys
from rllm.cli import main, terminal

if len(sys.argv) > 1:
    main()
terminal.console().print("[bold]loss[/] [red]0.5[/]")
"""


def shown(*arguments, **variables):
    """What the program prints on a terminal."""
    screen, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", SAYS, *arguments], stdout=theirs, env={**plain, "TERM": "xterm", **variables}
    ):
        os.close(theirs)
        pieces = list(iter(lambda: _read(screen), b""))
    os.close(screen)
    return b"".join(pieces).decode()


def _read(screen):
    try:
        return os.read(screen, 65536)
    except OSError:  # as Linux says that the other end is closed
        return b""


@pytest.mark.parametrize("arguments", [(), ("explain", "--help")])
def test_no_color_means_plain_letters(arguments):
    assert STYLE.search(shown(*arguments))
    assert not STYLE.search(shown(*arguments, NO_COLOR="1"))


def test_a_pipe_gets_plain_letters_and_wide_tables(capsys):
    terminal.console().print("[bold]loss[/] [red]0.5[/]")
    assert capsys.readouterr().out == "loss 0.5\n"
    assert terminal.console(wide=True).width == 200
