"""Output on a terminal, in a real pseudo-terminal, and in a pipe."""

import os
import pty
import re
import subprocess
import sys

import pytest

from rllm.cli import terminal

STYLE = re.compile(r"\x1b\[[0-9;]*m")
PROGRAM = """
import sys
from rllm.cli import main, terminal

if len(sys.argv) > 1:
    main()
terminal.console().print("[bold]loss[/] [red]0.5[/]")
"""


def shown(*arguments, **variables):
    """Return the output of the program on a terminal."""
    screen, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=theirs, env={**plain, "TERM": "xterm", **variables}
    ):
        os.close(theirs)
        pieces = list(iter(lambda: _read(screen), b""))
    os.close(screen)
    return b"".join(pieces).decode()


def _read(screen):
    try:
        return os.read(screen, 65536)
    except OSError:  # as Linux reports that the other end is closed
        return b""


@pytest.mark.slow
def test_no_color_disables_colors():
    assert STYLE.search(shown())
    assert not STYLE.search(shown(NO_COLOR="1"))


def test_pipe_gets_no_colors_and_wide_tables(capsys):
    terminal.console().print("[bold]loss[/] [red]0.5[/]")
    assert capsys.readouterr().out == "loss 0.5\n"
    assert terminal.console(wide=True).width == 200


NO_TORCH = """
import sys
from rllm.cli import main

class Watched:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            sys.exit("torch is imported")

sys.meta_path.insert(0, Watched())
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["train", "my_agent.py:agent", "--data", "tasks.jsonl", "--model"],
        ["eval", "my_agent.py:agent", "--data", "tasks.jsonl", "--model"],
        ["sft", "tasks.jsonl", "--model"],
        ["serve", "--port", "0"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize(
    ("model", "about"),
    [(None, r" \(\S+K parameters\)"), ("nobody/nothing", " \\(not on this machine yet, .*\\)")],
)
def test_first_line_is_printed_before_importing_torch(work, policy, command, model, about):
    """Importing torch takes seconds, in which a new user should already see output."""
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *command, str(model or policy)],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HOME": str(work)},
    )
    first, *_, last = (done.stdout + done.stderr).splitlines()
    assert re.match(rf"(rllm serve: )?loading {re.escape(str(model or policy))}{about}", first)
    assert last == "torch is imported"


@pytest.mark.parametrize("model", ["./nothing", "nothing", "a/b/c"])
def test_invalid_hub_id_is_not_announced_as_a_download(model):
    assert terminal.loading(model) == f"loading {model}"


@pytest.mark.slow
def test_demo_prints_before_importing_torch(tmp_path):
    command = [sys.executable, "-c", NO_TORCH, "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("loading a tiny model")
    assert done.stderr == "torch is imported\n"
