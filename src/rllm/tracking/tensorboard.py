"""TensorBoard's event files, in the run's folder `tensorboard`."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.errors import MissingDependencyError
from rllm.tracking.about import about_run
from rllm.tracking.samples import COLUMNS, sample_rows
from rllm.tracking.told import Told
from rllm.types import Episode

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto
except ModuleNotFoundError as error:
    raise MissingDependencyError.of("tensorboard", "tensorboard", "trackers=tensorboard") from error


class TensorBoardTracker:
    """Writes scalars, and samples as tables of the text plugin."""

    def __init__(self, run_dir: Path) -> None:
        self._told = Told(run_dir, "tensorboard")
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        about = about_run(run_dir)
        self._log_samples = about.log_samples
        settings = json.dumps(about.settings, indent=2)
        self._tell(0, {"settings": _text("settings", f"<pre>{html.escape(settings)}</pre>")})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()}
        self._tell(step, values)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        rows = sample_rows(step, episodes, self._log_samples)
        if rows:
            self._tell(step, {f"samples/{split}": _text(f"samples/{split}", _markdown(rows))})

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        self._writer.close()

    def _tell(self, step: int, values: Mapping[str, Any]) -> None:
        self._told.once(step, values, lambda new: self._write(step, list(new.values())))

    def _write(self, step: int, values: Sequence[Any]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()


def _text(tag: str, markdown: str) -> Any:
    metadata = create_summary_metadata(display_name="", description="")
    return Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto([markdown.encode()]))


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    """Return a value in one line of a table, markup in it as it was written."""
    return "<br>".join(html.escape(str(value)).replace("|", "&#124;").split("\n"))
