"""Readers that leave before the work is done."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rllm.tracking.base import Trackers
from rllm.tracking.console import ConsoleTracker
from rllm.tracking.printed import LastingConsole


def test_work_goes_on_when_its_reader_leaves(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        trackers = Trackers([ConsoleTracker(tmp_path, LastingConsole(stream))])
        trackers.log(1, {"rollout/reward": 1.0})
        assert os.read(reader, 1000) == b"step 1: reward 1.000\n"
        os.close(reader)
        trackers.log(2, {"rollout/reward": 2.0})
        trackers.log(3, {"rollout/reward": 3.0})
        print("others write there, too", file=stream, flush=True)


def test_what_is_printed_on_no_file_is_printed() -> None:
    stream = io.StringIO()
    LastingConsole(stream).print("step 1")
    assert stream.getvalue() == "step 1\n"
