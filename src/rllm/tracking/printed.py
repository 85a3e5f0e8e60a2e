"""What commands print, and go on without where nobody reads it any more."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rich.console import Console


class LastingConsole(Console):
    """Prints to one stream, whatever agents make of `sys.stdout` and `sys.stderr`. Where its reader leaves, as `head` does, and as
    `tee` does at the Ctrl-C that is to end the command in order, nothing is printed from then on; rich by itself would end the
    program."""

    def __init__(self, stream: Any, *, color_system: Any = "auto") -> None:
        super().__init__(file=stream, highlight=False, color_system=color_system)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # a stream that is no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())  # for what others write there
            os.close(nowhere)
