"""trackio: on this machine, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from pathlib import Path
from typing import Any

from rllm.errors import MissingDependencyError
from rllm.tracking.about import about_run, kept_id
from rllm.tracking.samples import COLUMNS, sample_rows
from rllm.tracking.told import Told
from rllm.types import Episode

try:
    import trackio
except ModuleNotFoundError as error:
    raise MissingDependencyError.of("trackio", "trackio", "trackers=trackio") from error


class TrackioTracker:
    """A trackio run for each run, gone on with when that is resumed."""

    def __init__(self, run_dir: Path) -> None:
        about = about_run(run_dir)
        self._log_samples = about.log_samples
        resumed = (run_dir / ".trackio-id").exists()
        with redirect_stdout(sys.stderr):  # which belongs to what programs read
            self._run = copy_context().run(  # trackio would end at exit what it takes for the current run
                trackio.init,
                project=about.project,
                name=kept_id(run_dir, "trackio", lambda: about.name),
                resume="allow" if resumed else "never",
                config=about.flat_settings(),
                embed=False,
            )
        self._told = Told(run_dir, "trackio", arrived=_last_step(self._run) if resumed else None)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._told.once(step, metrics, lambda new: self._run.log(new, step=step))

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        rows = sample_rows(step, episodes, self._log_samples)
        if rows:
            self.log(step, {f"samples/{split}": trackio.Table(columns=COLUMNS, data=rows)})

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def _last_step(run: Any) -> int | None:
    """The last step that trackio has of a resumed run, -1 for none; `None` if this version of it does not say."""
    if not hasattr(run, "_initial_last_step"):
        return None
    return -1 if run._initial_last_step is None else int(run._initial_last_step)
