"""What commands print on, and the words that all of them print."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm._runtime.files import from_here

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_ELSEWHERE = 200
"""How wide tables may be where no terminal bounds them."""


def console(*, stderr: bool = False, wide: bool = False) -> Console:
    """Where a command prints: in plain letters where no terminal is or `NO_COLOR` is set; there `wide` tables are not cut."""
    from rllm.tracking.console import LastingConsole

    stream = sys.stderr if stderr else sys.stdout
    found = LastingConsole(stream, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if wide and not found.is_terminal:
        found.width = _WIDTH_ELSEWHERE
    return found


def loading(model: str) -> str:
    """Return `loading MODEL (its size)`, for a line that is printed before torch is imported, which takes seconds."""
    from rllm.config.model_sizes import size_in_words

    about = size_in_words(model)
    return f"loading {model} ({about})" if about else f"loading {model}"


def print_json(values: Mapping[str, Any]) -> None:
    """The last line of `--json`."""
    print(json.dumps(values), flush=True)


def say(text: str) -> None:
    """Print what a server has to say, for as long as somebody reads it: it is wanted also behind `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The text is still in the stream's buffer, where it would be an error again when the program ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command() -> str:
    """How this user can start `rllm`: by name where it is on the PATH, else as it was started now."""
    if shutil.which("rllm"):
        return "rllm"
    started = Path(sys.argv[0])
    if started.name != "rllm":
        return f"{sys.executable} -m rllm"
    return str(from_here(started))
