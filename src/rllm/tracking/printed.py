"""What commands print, and go on without where nobody reads it any more."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rllm._runtime.untrusted import shown


class LastingConsole(Console):
    """Prints to one stream, whatever agents make of `sys.stdout` and `sys.stderr`. Where its reader leaves, as `head` does, and as
    `tee` does at the Ctrl-C that is to end the command in order, nothing is printed from then on; rich by itself would end the
    program. And a text is never more than text: what it holds of a terminal's own language is shown, and not obeyed."""

    def __init__(self, stream: Any, *, color_system: Any = "auto") -> None:
        super().__init__(file=stream, highlight=False, color_system=color_system)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else Segment(shown(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # a stream that is no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())  # for what others write there
            os.close(nowhere)
