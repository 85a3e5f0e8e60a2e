"""Readers that leave before the work is done, and texts that a terminal would interpret."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rllm.tracking.base import Trackers
from rllm.tracking.console import ConsoleTracker, LastingConsole


def test_work_continues_after_the_reader_closes_the_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        trackers = Trackers([ConsoleTracker(tmp_path, LastingConsole(stream))])
        trackers.log(1, {"rollout/reward": 1.0})
        assert os.read(reader, 1000).endswith(b"\nstep 1: reward 1.000\n")
        os.close(reader)
        trackers.log(2, {"rollout/reward": 2.0})
        trackers.log(3, {"rollout/reward": 3.0})
        print("others write there, too", file=stream, flush=True)


def test_stream_without_a_file_descriptor_is_supported() -> None:
    stream = io.StringIO()
    LastingConsole(stream).print("step 1")
    assert stream.getvalue() == "step 1\n"


def test_text_of_a_model_is_escaped() -> None:
    stream = io.StringIO()
    console = LastingConsole(stream, color_system=None)
    message = "a\x1b]52;c;ZXZpbA==\x07b\x9b2Jc\x7f\td\ne"
    table = Table(box=None, show_header=False)
    table.add_row(Text(message))
    for shown in (message, Text(message), table):
        console.print(shown)
    printed = stream.getvalue()
    assert not set(printed) & {*map(chr, range(0x7F, 0xA0)), *map(chr, range(0x20))} - {"\n"}
    assert printed.count("a\u241b]52;c;") == 3
