"""Weights & Biases. Its own variables say the rest: WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY, ..."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rllm.errors import MissingDependencyError
from rllm.ids import new_id
from rllm.tracking.about import about_run, kept_id
from rllm.tracking.samples import COLUMNS, sample_rows
from rllm.types import Episode

try:
    import wandb
except ModuleNotFoundError as error:
    raise MissingDependencyError.of("wandb", "wandb", "trackers=wandb") from error


class WandbTracker:
    """A W&B run for each run, gone on with when that is resumed."""

    def __init__(self, run_dir: Path) -> None:
        about = about_run(run_dir)
        self._run = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else about.project,
            name=None if "WANDB_NAME" in os.environ else about.name,
            id=kept_id(run_dir, "wandb", new_id),
            resume="allow",
            reinit="create_new",
            dir=None if "WANDB_DIR" in os.environ else str(run_dir),
            config=dict(about.settings),
            settings=wandb.Settings(console="off"),
        )
        # W&B's own counter cannot go back to a step that is made again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        rows = sample_rows(step, episodes)
        if rows:
            table = wandb.Table(columns=COLUMNS, data=rows, allow_mixed_types=True)
            self._run.log({"step": step, f"samples/{split}": table})

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        self._run.finish()
