"""Weights & Biases. Its own variables say the rest: WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY, ..."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm._runtime.ids import new_id
from rllm.errors import MissingDependencyError
from rllm.tracking.about import about_run, kept_id
from rllm.tracking.samples import COLUMNS, sample_rows
from rllm.tracking.told import Told
from rllm.types import Episode

try:
    import wandb
except ModuleNotFoundError as error:
    raise MissingDependencyError.of("wandb", "wandb", "trackers=wandb") from error


class WandbTracker:
    """A W&B run for each run, gone on with when that is resumed."""

    def __init__(self, run_dir: Path) -> None:
        about = about_run(run_dir)
        self._log_samples = about.log_samples
        self._run = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else about.project,
            name=None if "WANDB_NAME" in os.environ else about.name,
            id=kept_id(run_dir, "wandb", new_id),
            resume="allow",
            reinit="create_new",
            dir=None if "WANDB_DIR" in os.environ else str(run_dir),
            config=dict(about.settings),
            settings=wandb.Settings(console="off", **_prompt()),
        )
        self._told = Told(run_dir, "wandb", arrived=last_step(self._run))
        # W&B's own counter cannot go back to a step that is made again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._told.once(step, metrics, lambda new: self._run.log({"step": step, **new}))

    def log_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        rows = sample_rows(step, episodes, self._log_samples)
        if rows:
            table = wandb.Table(columns=COLUMNS, data=rows, allow_mixed_types=True)
            self.log(step, {f"samples/{split}": table})

    def progress(self, phase: str, done: int, total: int) -> None:
        """Only results are recorded."""

    def close(self) -> None:
        self._run.finish()


def _prompt() -> dict[str, float]:
    """The setting that has W&B's own process write at once what it was told: it ends soon after training is killed."""
    name = "x_transaction_log_flush_interval"
    return {name: 0.1} if name in wandb.Settings.model_fields else {}


def last_step(run: Any) -> int | None:
    """The last step that W&B has of a resumed run, -1 for none; `None` where it cannot say, as offline."""
    return run.summary.get("step", -1) if run.resumed else None
